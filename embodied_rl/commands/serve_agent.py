"""``python -m embodied_rl.serve_agent model=FOLDER``: a language model behind OpenAI's interface that records the answers to agents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.bounds import Seconds, Seed, Slots, Tokens
from embodied_rl.commands.cli import Argument, Command, WrittenFolder, as_command, serve_until_stopped, server_arguments
from embodied_rl.progress import progress_bar
from embodied_rl.reading import require_model_folder

if TYPE_CHECKING:
    from embodied_rl.serving.agents.app import AgentProxy

COMMAND = Command(
    name="serve_agent",
    summary="Serve a language model to agent programs (POST /v1/chat/completions) and record token ids, log-probabilities and rewards.",
    arguments=(
        Argument("model", str, "folder with a Hugging Face model, its tokenizer and chat template"),
        Argument("name", str, "model name for clients; default: the folder's name", None),
        Argument("adapter", str, "folder of a LoRA adapter", None),
        Argument("device", str, "cpu, cuda, cuda:1, …; auto: a GPU if there is one", "cpu"),
        *server_arguments(8710),
        Argument("output", WrittenFolder, "folder for finished sessions, one JSON file each", "captured"),
        Argument("max_new_tokens", Tokens, "most tokens of one answer; clients can ask for fewer", 1024),
        Argument("max_batch", Slots, "answers that are sampled at the same time", 64),
        Argument("stop", str, "tokens that end an answer besides the end-of-sequence token, separated by commas", None),
        Argument("policy_sampling", bool, "always sample at temperature 1 without top-p or top-k, ignoring the client's settings", False),
        Argument("max_sessions", Slots, "most sessions at a time", 1024),
        Argument("idle_s", Seconds, "end a session after this long without a request", 3600.0),
        Argument("seed", Seed, "seed for requests without one", 0),
    ),
    examples=("model=models/qwen3-0.6b", "model=models/qwen3-0.6b port=8710 output=captured policy_sampling=true"),
)


@as_command
def main(argv: Sequence[str]) -> None:
    values, _ = COMMAND.parse(argv)
    with progress_bar(f"loading {values['model']} to serve it on port {values['port']}"):
        proxy, token = start(values)
    message = f"Serving at {proxy.base_url}; finished sessions are written to {values['output']}"
    serve_until_stopped(proxy.close, message, token, "Token for opening sessions")


def start(values: dict[str, Any]) -> tuple[AgentProxy, str | None]:
    """Start the proxy of the arguments; returns (the listening proxy, its token if it is new). Raises UserError."""
    require_model_folder(Path(values["model"]))  # before torch is loaded
    from embodied_rl.config.policy import LanguageConfig
    from embodied_rl.generation.torch_tokens import TorchTokens
    from embodied_rl.learning.devices import resolve_device
    from embodied_rl.policies.language import build_language_policy
    from embodied_rl.serving.agents.app import AgentProxy, ProxyOptions
    from embodied_rl.serving.agents.sessions import SessionLimits
    from embodied_rl.serving.http_server import HttpProblem, HttpRequest, HttpServer, Reply, token_to_ask_for

    def refuse(request: HttpRequest) -> Reply:
        raise HttpProblem(503, "starting", "The model is still being loaded; try again soon.")

    # Before a model is loaded in vain.
    token, is_new = token_to_ask_for(values["token"], values["host"])
    HttpServer(refuse, host=values["host"], port=values["port"]).close()
    policy = build_language_policy(LanguageConfig(model=values["model"], adapter=values["adapter"]), resolve_device(values["device"]))
    model = policy.generation_model()
    backend = TorchTokens(model, max_batch=values["max_batch"], seed=values["seed"], tokenizer=policy.tokenizer)
    stops = [name.strip() for name in (values["stop"] or "").split(",") if name.strip()]
    options = ProxyOptions(
        model=values["name"] or Path(values["model"]).resolve().name,
        stop_ids=policy.tokenizer.stop_ids(*stops),
        max_new_tokens=values["max_new_tokens"],
        policy_sampling=values["policy_sampling"],
        output=Path(values["output"]),
    )
    limits = SessionLimits(values["max_sessions"], values["idle_s"])
    proxy = AgentProxy(backend, policy.tokenizer, options, host=values["host"], port=values["port"], token=token, limits=limits)
    return proxy, token if is_new else None
