"""``python -m embodied_rl.serve_agent model=FOLDER``: a language model behind OpenAI's interface that records the answers to agents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.bounds import Seconds, Seed, Slots, Tokens
from embodied_rl.commands.cli import Argument, Command, WrittenFolder, as_command, serve_until_stopped, server_arguments
from embodied_rl.progress import progress_bar

if TYPE_CHECKING:
    from embodied_rl.serving.agents.app import AgentProxy

COMMAND = Command(
    name="serve_agent",
    summary="Serve a language model to agent programs (POST /v1/chat/completions) and write down token ids, log-probabilities and rewards.",
    arguments=(
        Argument("model", str, "folder with a Hugging Face model, its tokenizer and chat template"),
        Argument("name", str, "what clients call the model; default: the folder's name", None),
        Argument("adapter", str, "folder of a LoRA adapter", None),
        Argument("device", str, "cpu, cuda, cuda:1, …", "cpu"),
        *server_arguments(8710),
        Argument("output", WrittenFolder, "folder for ended sessions, one JSON file each", "captured"),
        Argument("max_new_tokens", Tokens, "of one answer, whatever a client asks for", 1024),
        Argument("max_batch", Slots, "answers that are sampled side by side", 64),
        Argument("stop", str, "tokens that end an answer, beside the end of a sequence, separated by commas", None),
        Argument("policy_sampling", bool, "temperature 1 and nothing cut off, whatever a client asks for", False),
        Argument("max_sessions", Slots, "sessions at a time", 1024),
        Argument("idle_s", Seconds, "a session without a request for so long is ended", 3600.0),
        Argument("seed", Seed, "of requests that bring none", 0),
    ),
    examples=("model=models/qwen3-0.6b", "model=models/qwen3-0.6b port=8710 output=captured policy_sampling=true"),
)


@as_command
def main(argv: Sequence[str]) -> None:
    values, _ = COMMAND.parse(argv)
    with progress_bar(f"loading {values['model']} to serve it on port {values['port']}"):
        proxy, token = start(values)
    message = f"Serving at {proxy.base_url}; ended sessions go to {values['output']}"
    serve_until_stopped(proxy.close, message, token, "Sessions are opened with this token")


def start(values: dict[str, Any]) -> tuple[AgentProxy, str | None]:
    """Start the proxy of the arguments; returns (the listening proxy, its token if it is new). Raises UserError."""
    from embodied_rl.config.policy import LanguageConfig
    from embodied_rl.generation.torch_tokens import TorchTokens
    from embodied_rl.policies.language import build_language_policy
    from embodied_rl.serving.agents.app import AgentProxy, ProxyOptions
    from embodied_rl.serving.agents.sessions import SessionLimits
    from embodied_rl.serving.http_server import token_to_ask_for

    token, is_new = token_to_ask_for(values["token"], values["host"])  # before a model is loaded in vain
    policy = build_language_policy(LanguageConfig(model=values["model"], adapter=values["adapter"]), values["device"])
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
