"""benchmarks/vla.py and benchmarks/vla_training.py run for real with few rounds, and the roofline against figures worked out elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.test_benchmark_runs import run_script
from tests.test_benchmarks import agree, columns, minus, over, printed, scripts_can_be_imported  # noqa: F401 (a fixture that this module uses too)

pytest.importorskip("transformers")


@pytest.fixture
def vla() -> Iterator[ModuleType]:
    import vla as module

    return module


@pytest.mark.slow
def test_vla_runs_on_a_cpu() -> None:
    lines = run_script("vla.py", "--cpu", "--rounds", "8")
    table = columns(lines, below="a decision")
    ms = {name: printed(cells[0]) for name, cells in table.items()}
    assert set(ms) == {"ours", "transformers' generate", "images and prompt alone", "ours, without them"}
    figure = re.fullmatch(
        r"figure: transformers' generate / ours = ([\d.]+)x per action, fastest rounds ([\d.]+)x \(reach: 3x, (kept|missed)\); "
        r"without images and prompt (-?[\d.]+)x",  # below 0 where the machine stood still for the images alone
        lines[-1],
    )
    assert figure is not None
    assert agree(printed(figure[1]), over(ms["transformers' generate"], ms["ours"]))
    language = minus(ms["transformers' generate"], ms["images and prompt alone"])
    assert agree(printed(figure[4]), over(language, ms["ours, without them"]))
    low, high = (min(bounds) for bounds in zip(printed(figure[1]), printed(figure[2]), strict=True))
    assert high >= 3.0 if figure[3] == "kept" else low <= 3.0
    (difference,) = re.findall(r"results differ by ([\d.e+-]+) at most", "\n".join(lines))
    assert float(difference) < 1e-3


@pytest.mark.slow
def test_vla_training_runs() -> None:
    pytest.importorskip("peft")
    lines = run_script("vla_training.py", "--device", "cpu", "--shape", "tiny", "--rows", "2", "--rounds", "1", "--rank", "8")
    table = columns(lines, below="training step")
    ways = ["all weights", "all weights, checkpointing", "LoRA", "LoRA, checkpointing", "all weights, FSDP2 offload", "LoRA, FSDP2 offload"]
    assert list(table) == ways
    trained = {way: int(cells[0].replace(",", "")) for way, cells in table.items()}
    ms, tokens_per_s, mib = ({way: printed(cells[index]) for way, cells in table.items()} for index in (1, 2, 3))
    assert trained["all weights"] == trained["all weights, checkpointing"] == 2_351_215
    # Rank 8 on the vocabulary's output layer: 8 * (32 + 32064) of the weights, whatever the others add.
    assert 8 * (32 + 32064) < trained["LoRA"] == trained["LoRA, checkpointing"] < 0.25 * trained["all weights"]
    for way in table:
        # Two rows of 256 patches, 35 tokens of the prompt and six of the seven actions.
        tokens = 1e3 * 2 * 297
        assert agree(tokens_per_s[way], over((tokens, tokens), ms[way]))
        assert mib[way][0] > 0
    ratios = re.findall(r"([\d.]+)x the time, ([\d.]+)x the memory", lines[-1])
    assert lines[-1].startswith("figure: LoRA against all weights ")
    pairs = [("LoRA", "all weights"), ("all weights, checkpointing", "all weights"), ("LoRA, checkpointing", "LoRA")]
    for (seconds, memory), (one, other) in zip(ratios, pairs, strict=True):
        assert agree(printed(seconds), over(ms[one], ms[other]))
        assert agree(printed(memory), over(mib[one], mib[other]))


def test_chunks_are_decided_as_on_a_gpu(vla: ModuleType) -> None:
    import torch

    from embodied_rl.policies.openvla.oft import OFTConfig, OpenVLAOFT
    from embodied_rl.policies.openvla.processor import PixelNormaliser

    model = vla.random_model(lambda: OpenVLAOFT(vla.tiny_config(), OFTConfig(chunk=2)), "cpu", torch.float32)
    given = vla.random_inputs(3, "cpu", 14)
    with torch.no_grad():
        decided = vla.decide(model, PixelNormaliser())(**given)
    assert decided.choices.shape == (3, 14)
    # A nearly uniform distribution: weights of size 0.02.
    assert decided.log_prob.mean().item() == pytest.approx(-5.545, abs=0.5)


@pytest.mark.gpu
@pytest.mark.slow
def test_vla_runs_on_a_gpu() -> None:
    lines = run_script("vla.py", "--rounds", "2", "--batches", "1")
    assert lines[-1].startswith("figure: OpenVLA 7B")
    assert "OpenVLA-OFT, CUDA graph" in columns(lines, below="side")


def test_roofline_of_the_published_model(vla: ModuleType) -> None:
    from embodied_rl.policies.openvla.config import OpenVLAConfig

    config, h200 = OpenVLAConfig.openvla_7b(), vla.PEAKS["H200"]
    # Worked out independently for one H200: 4.28 TFLOP an action; 42, 128, 164 and 179 actions/s; OFT with one image 158 chunks/s.
    assert vla.flop_of(config, 1, 291, steps=6) == pytest.approx(4.28e12, rel=0.01)
    for batch, actions_per_s in ((1, 42), (8, 128), (32, 164), (256, 179)):
        assert batch / vla.roofline_s(config, batch, 1, 291, 6, h200) == pytest.approx(actions_per_s, rel=0.02)
    assert 1 / vla.roofline_s(config, 1, 1, 348, 0, h200) == pytest.approx(158, rel=0.01)


def test_step_reads_the_language_model(vla: ModuleType) -> None:
    from embodied_rl.policies.openvla.config import OpenVLAConfig

    # Llama 2 7B has 6,738,415,616 weights: less two vocabularies of 32000 x 4096 and 65 norms of 4096; 256 output rows come back.
    weights = 6_738_415_616 - 2 * 32000 * 4096 - 65 * 4096 + 256 * 4096
    assert vla.language_bytes(OpenVLAConfig.openvla_7b()) == 2 * weights


def test_devices_are_known_by_a_part_of_their_name(vla: ModuleType) -> None:
    assert vla.peaks_of("NVIDIA H200") == (790e12, 4.3e12)
    assert vla.peaks_of("NVIDIA Something") is None
