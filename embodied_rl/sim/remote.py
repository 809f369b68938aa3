"""Environments behind a URL as an ordinary simulator: ``sim=remote``.

The server (`python -m embodied_rl.serve_envs`, or one with ROCK's GEM routes) keeps the environments; after a broken connection the client
reconnects and the episode continues. Needs neither torch nor anything outside the standard library.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from embodied_rl.errors import UserError, did_you_mean, require_known
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.faults import WrongShapeError
from embodied_rl.sim.remote_client import Answer, JsonClient, Patience, RemoteFault
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.sim.wire import WireError, decode_array, decode_observation, decode_snapshot, decode_spec, encode_action, encode_snapshot
from embodied_rl.types import SimSpec, StepBuffers

PROTOCOLS = ("embodied_rl", "rock")
_ERRORS = {"snapshot_error": SnapshotError, "out_of_memory": MemoryError, "wrong_shape": WrongShapeError}
"""{kind of a service's failure: our exception}; for other kinds see `_error`."""
_CONNECT_S = 10.0
"""Seconds within which a server must answer at all when environments are made."""


def make(
    num_envs: int,
    url: str = "http://127.0.0.1:8700",
    sim: str = "cartpole",
    task: str | None = None,
    protocol: str = "embodied_rl",
    sim_kwargs: Mapping[str, Any] | None = None,
    token_env: str = "EMBODIED_RL_TOKEN",
    attempt_s: float = 20.0,
    deadline_s: float = 50.0,
    start_timeout_s: float = 170.0,
    **kwargs: Any,
) -> SimEnv:
    """`num_envs` environments of a service, each in its own process there.

    Args:
        sim: the simulator's name in the service's catalogue; unused for ROCK.
        task: another task of it; None: its own. For ROCK, the environment's id.
        protocol: "embodied_rl", or "rock" for ``/apis/v1/envs/gem/…``.
        token_env: environment variable with the service's token, if the service asks for one.
        attempt_s: seconds without an answer after which a request is sent again on another connection.
        deadline_s: seconds for one call with all its retries.
        start_timeout_s: seconds for building the environments.
        **kwargs: for ROCK, arguments of `embodied_rl.sim.text.gem.make` beside the task: history, success_return, text sizes.

    Raises UserError: no service answers at the URL, or it refuses the request.
    """
    require_known(protocol, PROTOCOLS, f"sim.kwargs.protocol='{protocol}' is not a choice.")
    client = JsonClient(url, token=os.environ.get(token_env), patience=Patience(attempt_s=attempt_s, deadline_s=deadline_s))
    if protocol == "rock":
        from embodied_rl.sim.text.gem import RockSim

        if sim_kwargs:
            raise UserError("sim.kwargs.sim_kwargs is not for protocol=rock: its make takes only the environment's id.")
        return RockSim(client, task, num_envs, **kwargs)
    if kwargs:
        names = ["url", "sim", "task", "protocol", "sim_kwargs", "token_env", "attempt_s", "deadline_s", "start_timeout_s"]
        raise UserError(f"sim.kwargs.{min(kwargs)} is not known; the simulator's own go into sim_kwargs.{did_you_mean(min(kwargs), names)}")
    return RemoteSim.made(client, num_envs, sim, task, sim_kwargs or {}, start_timeout_s)


class RemoteSim(SimEnv):
    """Environments of a service; see `make`. Every request is numbered, so that a repeated one is not executed twice.

    A fault of the service counts as a local one: the manager makes new environments and resumes the episodes. This client's other
    environments are closed with the failed one, as they would end with a local worker.
    """

    def __init__(self, client: JsonClient, env_ids: Sequence[str], spec: SimSpec, numbers: Sequence[int]) -> None:
        """Use existing environments; see `made` and `attached`."""
        self._client = client
        self._closed = False
        self.env_ids: list[str] = list(env_ids)
        """Service's names of the environments."""
        self._numbers = list(numbers)
        # The service runs each in its own process, even for simulators that otherwise step together.
        self.spec: SimSpec = replace(spec, steps_together=False)

    @staticmethod
    def made(client: JsonClient, num_envs: int, sim: str, task: str | None, kwargs: Mapping[str, Any], start_timeout_s: float) -> RemoteSim:
        """Make new environments. Raises UserError: no service answers, or it refuses."""
        asked = {"sim": sim, "task": task, "kwargs": dict(kwargs), "count": num_envs, "encoding": "base64"}
        with _reached(client):
            answer = client.call("POST", "/v1/environments", {**asked, "request": secrets.token_hex(12)}, deadline_s=start_timeout_s)
            if answer.status != 201:
                raise _error(answer, f"simulator '{sim}' cannot be made at {client.url}")
        env_ids = [str(env_id) for env_id in answer.body["environments"]]
        return RemoteSim(client, env_ids, decode_spec(answer.body["spec"]), [0] * num_envs)

    @staticmethod
    def attached(client: JsonClient, env_ids: Sequence[str]) -> RemoteSim:
        """Environments that another client made, in the middle of their episodes, so that a restarted client can continue them. Raises
        UserError: no service answers at the URL, or no environment is named; RemoteFault: one of them is gone."""
        if not env_ids:
            raise UserError("Name at least one environment to continue with.")
        with _reached(client):
            found = [client.call("GET", f"/v1/environments/{env_id}") for env_id in env_ids]
            for env_id, answer in zip(env_ids, found, strict=True):
                if answer.status != 200:
                    raise _error(answer, f"environment '{env_id}' at {client.url} cannot be continued")
        numbers = [int(answer.body["number"] or 0) for answer in found]
        return RemoteSim(client, env_ids, decode_spec(found[0].body["spec"]), numbers)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        extra = {} if not options else {"options": dict(options)}
        asked = {i: {"seed": int(seed), **extra} for i, seed in zip(env_ids, seeds, strict=True)}
        for i, body in self._ask("reset", asked).items():
            self._observe(i, body, out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """See `SimEnv.step`: one request for all."""
        asked = {i: {"action": encode_action(action)} for i, action in zip(env_ids, actions, strict=True)}
        try:
            answers = self._ask("step", asked)
        except RemoteFault as fault:
            if fault.kind != "non_finite" or fault.env_id is None:
                raise
            out.reward[fault.env_id] = np.nan  # the worker finds it and applies sim.non_finite
            return
        for i, body in answers.items():
            self._observe(i, body, out)
            out.reward[i] = body["reward"]
            out.terminated[i], out.truncated[i], out.success[i] = body["terminated"], body["truncated"], body["success"]
            out.info[i] = body["info"]

    def snapshot(self, env_id: int) -> bytes:
        """See `SimEnv`. Raises SnapshotError if the simulator has no snapshots."""
        return decode_snapshot(self._ask("snapshot", {env_id: {}})[env_id]["snapshot"])

    def restore(self, env_id: int, data: bytes) -> None:
        self._ask("restore", {env_id: {"snapshot": encode_snapshot(data)}})

    def render(self, env_id: int) -> np.ndarray:
        return decode_array(self._ask("render", {env_id: {}})[env_id]["image"], "uint8")

    def close(self) -> None:
        """Close this client's environments; if the service is unreachable, its idle limit closes them."""
        if self._closed:
            return
        self._closed = True
        self._client.send_all("DELETE", [(f"/v1/environments/{env_id}", None) for env_id in self.env_ids], deadline_s=2.0)
        self._client.close()

    def _ask(self, operation: str, asked: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Send one batch {environment here: arguments of the operation}; returns {environment here: its answer}. Closes all of this
        client's environments if it fails for good."""
        try:
            return self._answers(operation, asked)
        except UserError:
            raise
        except Exception:
            self.close()
            raise

    def _answers(self, operation: str, asked: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        items = []
        for i, arguments in asked.items():
            self._numbers[i] += 1
            items.append({"id": self.env_ids[i], "operation": operation, "number": self._numbers[i], **arguments})
        answer = self._client.call("POST", "/v1/batch", {"requests": items})
        if answer.status not in (200, 207):
            raise _error(answer, f"{operation} was refused by {self._client.url}")
        try:
            results = [Answer(int(result["status"]), result["body"]) for result in answer.body["results"]]
            found = dict(zip(asked, results, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteFault("bad_response", f"The answer of {self._client.url} to a batch is malformed: {error!r}") from error
        for i, result in found.items():
            if result.status != 200:
                what = f"{operation} of environment {i} ('{self.env_ids[i]}' at {self._client.url}) failed"
                raise _error(result, what, i)
        return {i: result.body for i, result in found.items()}

    def _observe(self, i: int, body: Mapping[str, Any], out: StepBuffers) -> None:
        try:
            for key, value in decode_observation(self.spec, body["observation"]).items():
                out.observation[key][i] = value
        except (WireError, KeyError) as error:
            raise WrongShapeError(f"The answer of {self._client.url} does not fit its spec: {error}") from error


@contextmanager
def _reached(client: JsonClient) -> Iterator[None]:
    """Context for the first requests to a service, which must answer; closes the client if one fails. Raises UserError."""
    try:
        require_server(client, "/v1/health")
        yield
    except BaseException:
        client.close()
        raise


def require_server(client: JsonClient, path: str) -> None:
    """Raises UserError unless a service answers at `path` and accepts our token."""
    try:
        answer = client.call("GET", path, deadline_s=_CONNECT_S)
    except RemoteFault as fault:
        raise UserError(
            f"No environment service answers at {client.url} ({fault}). Start one there: python -m embodied_rl.serve_envs; for another "
            "address, set sim.kwargs.url=…."
        ) from fault
    if answer.status == 401:
        raise UserError(f"{client.url} needs a token: set the environment variable that sim.kwargs.token_env names (EMBODIED_RL_TOKEN).")
    if answer.status != 200:
        raise UserError(f"{client.url} is not an environment service: {path} returned status {answer.status} ({answer.message}).")


def _error(answer: Answer, what: str, env_id: int | None = None) -> Exception:
    """Our exception for the kind of failure that the service reports of an environment."""
    message = f"{what}: {answer.message}"
    if answer.kind in _ERRORS:
        return _ERRORS[answer.kind](message)
    if answer.status in (400, 401, 403, 404, 413, 422) and answer.kind != "unknown_environment":
        return UserError(message[:1].upper() + message[1:])
    return RemoteFault(answer.kind or "bad_response", message, env_id)
