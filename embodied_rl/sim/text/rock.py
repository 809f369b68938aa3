"""GEM environments in ROCK's sandboxes ("ROCK", Alibaba 2025), by its routes ``POST /apis/v1/envs/gem/{make,reset,step,close}``.

The texts, turns and successes are put together as for GEM's environments in this process; only the games run elsewhere. ROCK's routes
know no request numbers, so that a step whose answer is lost is not sent again: the worker fails, and the manager takes its episodes up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.sim.private_random import PrivateRandom
from embodied_rl.sim.remote_client import Answer, JsonClient, RemoteFault
from embodied_rl.sim.text.gem import HISTORIES, GemSim
from embodied_rl.types import ActionSpec, VariableSpec

_ROUTES = "/apis/v1/envs/gem"
_MAKE_S = 170.0


def make_rock(
    client: JsonClient,
    task: str | None,
    num_envs: int,
    history: str = "none",
    success_return: float = 1.0,
    observation_bytes: int = 2**16,
    action_bytes: int = 2**14,
) -> RockSim:
    """`num_envs` sandboxes with one GEM environment each; see `embodied_rl.sim.text.gem.make` for the arguments.

    Raises:
        UserError: no task, or the server cannot be reached or refuses it.
    """
    if not task:
        raise UserError("protocol=rock needs the environment's id: sim.task=game:GuessTheNumber-v0-easy, say.")
    if history not in HISTORIES:
        raise UserError(f"ROCK: history='{history}' is not a choice.{did_you_mean(history, HISTORIES)}")
    return RockSim(client, task, num_envs, history, success_return, observation_bytes, action_bytes)


class RockSim(GemSim):
    """`GemSim` whose environments are sandboxes. See `make_rock`."""

    def __init__(
        self, client: JsonClient, task: str, num_envs: int, history: str, success_return: float, observation_bytes: int, action_bytes: int
    ) -> None:
        self._client = client
        self._sandboxes: list[Sandbox] = []
        try:
            parts = {"text": VariableSpec("text", observation_bytes)}
            super().__init__(task, num_envs, history, success_return, parts, ActionSpec.text(action_bytes), {})
        except BaseException:
            self.close()
            raise
        # A game begins anew from its seed; of other environments it is not known.
        self.spec = replace(self.spec, snapshots="replay" if self._family == "game" else "none", max_episode_steps=None)

    def sample_action(self, env_id: int, seed: int) -> str:
        """Raises UserError: the game, which knows its moves, is not here."""
        raise UserError(f"ROCK cannot draw a random move of '{self.spec.task}': the game is behind {self._client.url}.")

    def close(self) -> None:
        """Close the sandboxes; one that cannot be reached is left to the server."""
        sandboxes, self._sandboxes, self.envs = self._sandboxes, [], []
        for sandbox in sandboxes:
            try:
                sandbox.close()
            except RemoteFault:
                break
        self._client.close()

    def _make_one(self, task: str, kwargs: Mapping[str, Any], generator: PrivateRandom) -> Sandbox:
        sandbox = Sandbox(self._client, task)
        self._sandboxes.append(sandbox)
        return sandbox


class Sandbox:
    """One environment of the service, with GEM's own interface."""

    def __init__(self, client: JsonClient, task: str) -> None:
        """Make it. Raises UserError when the server refuses."""
        self._client = client
        try:
            answer = client.call("POST", f"{_ROUTES}/make", {"env_id": task}, repeat=False, deadline_s=_MAKE_S)
        except RemoteFault as fault:
            raise UserError(f"ROCK's server at {client.url} cannot make '{task}': {fault}") from fault
        found = _result(answer)
        if answer.status != 200 or not found.get("sandbox_id"):
            raise UserError(f"ROCK's server at {client.url} cannot make '{task}': status {answer.status}, {answer.message}.")
        self.sandbox_id = str(found["sandbox_id"])

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """(observation, info)"""
        found = self._ask("reset", {"seed": seed}, repeat=True)
        return str(found["observation"]), dict(found.get("info") or {})

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """(observation, reward, terminated, truncated, info)"""
        found = self._ask("step", {"action": action}, repeat=False)
        try:
            flags = bool(found["terminated"]), bool(found["truncated"])
            return str(found["observation"]), float(found["reward"]), *flags, dict(found.get("info") or {})
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteFault("bad_response", f"A step's answer of {self._client.url} is malformed: {error!r}") from error

    def close(self) -> None:
        """Raises RemoteFault where the server cannot be reached."""
        self._client.call("POST", f"{_ROUTES}/close", {"sandbox_id": self.sandbox_id}, deadline_s=2.0)

    def _ask(self, route: str, body: Mapping[str, Any], *, repeat: bool) -> dict[str, Any]:
        answer = self._client.call("POST", f"{_ROUTES}/{route}", {"sandbox_id": self.sandbox_id, **body}, repeat=repeat)
        found = _result(answer)
        if answer.status != 200 or "observation" not in found:
            what = f"{route} of sandbox '{self.sandbox_id}' at {self._client.url} failed"
            raise RemoteFault(answer.kind or "bad_response", f"{what}: status {answer.status}, {answer.message}")
        return found


def _result(answer: Answer) -> dict[str, Any]:
    """Newer servers put what older ones answer into ``result``, beside a status of their own."""
    inner = answer.body.get("result")
    return inner if isinstance(inner, dict) else answer.body
