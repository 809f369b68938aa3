"""benchmarks/vla.py run for real with few rounds, and its roofline against figures that were worked out elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.test_benchmark_runs import run_script
from tests.test_benchmarks import columns, scripts_can_be_imported  # noqa: F401 (a fixture that this module uses too)

pytest.importorskip("transformers")


@pytest.fixture
def vla() -> Iterator[ModuleType]:
    import vla as module

    return module


@pytest.mark.slow
@pytest.mark.ci_sample
def test_vla_runs_on_a_cpu() -> None:
    lines = run_script("vla.py", "--cpu", "--rounds", "8")
    table = columns(lines, below="a decision")
    ms = {name: float(cells[0]) for name, cells in table.items()}
    assert set(ms) == {"ours", "transformers' generate", "images and prompt alone", "ours, without them"}
    figure = re.fullmatch(
        r"figure: transformers' generate / ours = ([\d.]+)x per action, fastest rounds ([\d.]+)x \(reach: 3x, (kept|missed)\); "
        r"without images and prompt ([\d.]+)x",
        lines[-1],
    )
    assert figure is not None
    # Printed to 0.01 ms and 0.1x.
    assert float(figure[1]) == pytest.approx(ms["transformers' generate"] / ms["ours"], rel=0.01, abs=0.06)
    language = ms["transformers' generate"] - ms["images and prompt alone"]
    assert float(figure[4]) == pytest.approx(language / ms["ours, without them"], rel=0.02, abs=0.06)
    assert (figure[3] == "kept") == (min(float(figure[1]), float(figure[2])) >= 3.0)
    # Whatever else runs here: `generate` does all that ours does, and its bookkeeping for each token.
    assert ms["transformers' generate"] > 1.3 * ms["ours"]
    (difference,) = re.findall(r"results differ by ([\d.e+-]+) at most", "\n".join(lines))
    assert float(difference) < 1e-3
    training = columns(lines, below="training step, 4 rows")
    # Rank 32 on the vocabulary's output layer: 32 * (32 + 32064) of the weights, whatever the others add.
    assert int(training["LoRA, rank 32"][0].replace(",", "")) > 32 * (32 + 32064)
    assert int(training["all weights"][0].replace(",", "")) == 2_351_215


def test_chunks_are_decided_as_on_a_gpu(vla: ModuleType) -> None:
    import torch

    from embodied_rl.policies.openvla.images import PixelNormaliser
    from embodied_rl.policies.openvla.oft import OFTConfig, OpenVLAOFT

    model = vla.random_model(lambda: OpenVLAOFT(vla.tiny_config(), OFTConfig(chunk=2)), "cpu", torch.float32)
    given = vla.random_inputs(3, "cpu", 14)
    with torch.no_grad():
        decided = vla.decide_chunk(model, PixelNormaliser())(**given)
    assert decided.choices.shape == (3, 14)
    # A nearly uniform distribution: weights of size 0.02.
    assert decided.log_prob.mean().item() == pytest.approx(-5.545, abs=0.5)


@pytest.mark.gpu
@pytest.mark.slow
def test_vla_runs_on_a_gpu() -> None:
    lines = run_script("vla.py", "--rounds", "2", "--batches", "1", "--no-training")
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
