"""The arithmetic of the benchmarks, by hand; `test_benchmark_runs.py` runs the scripts."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.loggers.jsonl import JsonlLogger

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def scripts_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their modules have short names (`gate`, `tables`), which must not stay in everybody's way."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [path.stem for path in BENCHMARKS.glob("*.py")]:
        sys.modules.pop(name, None)


def columns(lines: list[str], *, below: str) -> dict[str, list[str]]:
    """{first column: the others} of the aligned table whose header begins with `below`."""
    (start,) = [index for index, line in enumerate(lines) if line.startswith(below)]
    rows = {}
    for line in lines[start + 2 :]:
        if not line:
            break
        first, *others = re.split(r" {2,}", line)
        rows[first] = others
    return rows


Range = tuple[float, float]


def printed(text: str) -> Range:
    """What a figure can have been that is printed so: "1,234" is 1233.5 to 1234.5, "0.1x" is 0.05 to 0.15.

    With it, what follows from figures holds whatever they are, also on a machine that stood still while one of them was measured.
    """
    number = text.replace(",", "").rstrip("x%")
    half = 0.5000001 * 10.0 ** -len(number.partition(".")[2])
    return float(number) - half, float(number) + half


def minus(first: Range, second: Range) -> Range:
    return first[0] - second[1], first[1] - second[0]


def over(first: Range, second: Range) -> Range:
    """A quotient; anything where the divisor may be 0."""
    if second[0] <= 0:
        return -math.inf, math.inf
    corners = [one / other for one in first for other in second]
    return min(corners), max(corners)


def agree(first: Range, second: Range) -> bool:
    """Whether both can be the same number."""
    return first[0] <= second[1] and second[0] <= first[1]


def test_figures_are_as_exact_as_they_are_printed() -> None:
    assert printed("1,234") == pytest.approx((1233.5, 1234.5))
    assert printed("-0.10x") == pytest.approx((-0.105, -0.095))
    assert agree(over(printed("10.0"), printed("4")), printed("2.8x"))  # 10.05 / 3.5 is 2.87
    assert not agree(over(printed("10.0"), printed("4")), printed("2.0x"))
    assert agree(over(printed("5"), printed("0")), printed("7.0"))
    assert minus(printed("3"), printed("1.0")) == pytest.approx((1.45, 2.55))
    assert over((-1.0, 2.0), (2.0, 4.0)) == (-0.5, 1.0)


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_tables_are_aligned() -> None:
    from tables import markdown_table, text_table

    assert text_table(["name", "x"], [["a", "1.5"], ["longer", "10"]]) == "name      x\n------  ---\na       1.5\nlonger   10"
    assert markdown_table(["name", "x"], [["a", "1"]]) == "| name | x |\n| --- | --- |\n| a | 1 |"


def test_provenance_names_versions_and_what_is_missing() -> None:
    from tables import provenance

    line = provenance("pytest", "no-such-package-anywhere")
    assert f"numpy {np.__version__}" in line
    assert f"pytest {pytest.__version__}" in line
    assert line.endswith("no-such-package-anywhere missing")


# ---- ppo_cpu --------------------------------------------------------------------------------------------------------


def test_gate_lets_iterations_through_and_its_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import gate as module

    clock = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    reports = io.StringIO()
    gate = module.Gate(io.StringIO('{"go": 2}\n{"go": 1}\n{"go": 0}\n'), reports, rest="update")
    gate.tell(threads=3)
    begun = []

    def train() -> None:
        while True:
            gate.begin()
            begun.append(clock[0])
            gate.add("environment", 1.0)
            gate.add("policy", 0.5)
            clock[0] += 4.0 * len(begun)  # iterations of 4, 8 and 12 seconds

    with pytest.raises(module.Stop):
        train()
    assert begun == [100.0, 104.0, 112.0]
    ready, first, second = (json.loads(line) for line in reports.getvalue().splitlines())
    assert (ready["iterations"], ready["seconds"]) == (0, 0.0)
    assert (first["iterations"], first["seconds"]) == (2, 12.0)
    assert first["phases"] == {"environment": 2.0, "policy": 1.0, "update": 9.0}
    assert (second["iterations"], second["seconds"]) == (1, 12.0)
    assert second["phases"] == {"environment": 1.0, "policy": 0.5, "update": 10.5}
    assert first["facts"] == {"threads": 3}


def test_gated_process_that_fails_is_told() -> None:
    from gate import GatedProcess

    dead = GatedProcess("dead", [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="contender 'dead' ended with status 3"):
        dead.wait_until_ready()
    dead.close()
    mute = GatedProcess("mute", [sys.executable, "-c", "import sys; sys.stdin.readline()"], timeout_s=0.1)
    with pytest.raises(RuntimeError, match=r"contender 'mute' did not answer within 0\.1 s"):
        mute.wait_until_ready()
    mute.close()
    assert mute._process.returncode == 0


def segments_of(seconds: list[float]) -> list[Any]:
    """Segments of 2 iterations each."""
    from gate import Segment

    return [Segment(2, s, {"environment": s / 2, "policy": s / 4, "update": s / 4}) for s in seconds]


def test_ppo_figure_is_ours_to_the_faster_of_two_peers() -> None:
    import ppo_cpu
    from ppo_contenders import EAGER, OURS, SB3_DUMMY, SB3_DUMMY_ONE, SB3_SUBPROC

    # 2 iterations of 100 steps: 200 / seconds.
    segments = {
        OURS: segments_of([0.1, 0.2, 0.25]),  # 2000, 1000, 800 steps/s: median 1000
        SB3_DUMMY: segments_of([0.4, 0.5, 1.0]),  # 500, 400, 200: median 400
        SB3_SUBPROC: segments_of([0.8, 0.4, 0.5]),  # 250, 500, 400: median 400, but faster in rounds 2 and 3
        SB3_DUMMY_ONE: segments_of([0.25, 0.25, 0.4]),  # 800, 800, 500: median 800
        EAGER: segments_of([0.2, 0.2, 0.2]),  # faster than all peers, and not in the figure
    }
    assert ppo_cpu.speeds(segments[OURS], 100) == pytest.approx([2000.0, 1000.0, 800.0])
    # Rounds: 2000 / 500, 1000 / 500, 800 / 400.
    assert ppo_cpu.figure(segments, 100) == "figure: ours / max(SB3 Dummy, SB3 Subproc) = 2.50x (rounds 2.00 to 4.00)"
    beside = ppo_cpu.beside(segments, 100).splitlines()
    assert beside[0] == "ours to stable-baselines3 at its best (SB3 DummyVecEnv, 1 thread): 1.25x"
    assert beside[1].startswith("caution: that is 2.0 times its default")
    quiet = {**segments, SB3_DUMMY_ONE: segments_of([0.4, 0.4, 0.4])}
    assert ppo_cpu.beside(quiet, 100) == "ours to stable-baselines3 at its best (SB3 DummyVecEnv, 1 thread): 2.00x"
    facts: dict[str, dict] = {name: {"threads": 2, "processes": 3} for name in segments}
    rows = columns(ppo_cpu.report(segments, facts, 100).splitlines(), below="end to end")
    # Medians over rounds of seconds per iteration: 0.2 / 2 halved and quartered.
    assert rows[OURS] == ["1000", "800", "2000", "2.50x", "0.050", "0.025", "0.025", "2", "3"]
    assert "none" in ppo_cpu.figure({OURS: segments[OURS]}, 100)
    # Another library takes part: rounds 2000 / 625, 1000 / 500, 800 / 500, medians 1000 / 500.
    wider = {**segments, "skrl": segments_of([0.32, 0.4, 0.4])}
    assert ppo_cpu.figure(wider, 100) == "figure: ours / max(SB3 Dummy, SB3 Subproc, skrl) = 2.00x (rounds 1.60 to 3.20)"


def test_workload_of_other_peers_is_the_configuration() -> None:
    from ppo_contenders import workload_of
    from ppo_cpu import EQUAL, TASKS
    from ppo_outside import Workload

    from embodied_rl.config.compose import load_train_config

    config = load_train_config([*TASKS["halfcheetah"], *EQUAL, "algorithm.minibatch_size=300", "policy.hidden_sizes=[8,9]"])
    work = workload_of(config)
    # 8 x 256 rows in parts of at most 300.
    assert (work.task, work.num_envs, work.rollout_steps, work.num_minibatches) == ("HalfCheetah-v5", 8, 256, 7)
    assert (work.hidden_sizes, work.learning_rate, work.gamma, work.gae_lambda, work.clip) == ((8, 9), 3e-4, 0.99, 0.95, 0.2)
    assert Workload.from_json(work.to_json()) == work
    with pytest.raises(UserError, match=r"cannot do the same: algorithm\.target_kl"):
        workload_of(load_train_config([*TASKS["halfcheetah"], *EQUAL, "algorithm.target_kl=0.1"]))


def test_soft_actor_critic_of_the_peer_is_the_configuration() -> None:
    from peers import sac_arguments
    from ppo_cpu import TASKS

    from embodied_rl.config.compose import load_train_config

    arguments = sac_arguments(load_train_config([*TASKS["sac_pendulum"], "algorithm.off_policy.updates_per_step=0.5"]))
    named = ("train_freq", "gradient_steps", "batch_size", "learning_starts", "tau", "ent_coef", "target_entropy")
    assert [arguments[name] for name in named] == [16, 8, 256, 256, 0.005, "auto_0.1", "auto"]
    assert arguments["policy_kwargs"]["net_arch"] == {"pi": [256, 256], "qf": [256, 256]}
    with pytest.raises(UserError, match=r"cannot do the same: algorithm\.off_policy\.layer_norm"):
        sac_arguments(load_train_config([*TASKS["sac_pendulum"], "algorithm.off_policy.layer_norm=true"]))


def test_peer_that_cannot_be_installed_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from peer_environments import MissingPeerError, PeerEnvironment, reason_of

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "setup.py").write_text("raise OSError('no compiler here')\n")
    peer = PeerEnvironment("broken", (str(broken),), without_dependencies=True)
    with pytest.raises(MissingPeerError, match=r"^broken: OSError: no compiler here$"):
        peer.python()
    assert peer.folder == tmp_path / "embodied_rl" / "peers" / "broken"
    assert not (peer.folder / "installed").exists()
    with pytest.raises(MissingPeerError, match=r"^old: too old$"):
        PeerEnvironment("old", ("old==1.0",), cannot="too old").python()
    assert reason_of("ERROR: No matching distribution found for x\n") == "ERROR: No matching distribution found for x"


def test_peer_gets_the_same_convolutions() -> None:
    pytest.importorskip("stable_baselines3")
    from gymnasium.spaces import Box
    from peers import ppo_arguments
    from ppo_cpu import EQUAL, TASKS

    from embodied_rl.config.compose import load_train_config
    from embodied_rl.policies.actor_critic import build_policy
    from embodied_rl.types import ActionSpec, SimSpec, TensorSpec

    config = load_train_config([*TASKS["pixel_reach_84"], *EQUAL])
    arguments = ppo_arguments(config)["policy_kwargs"]
    theirs = arguments["features_extractor_class"](Box(0, 255, (3, 84, 84), np.uint8), **arguments["features_extractor_kwargs"])
    spec = SimSpec("PixelReach", {"rgb": TensorSpec((84, 84, 3), "uint8")}, ActionSpec.continuous([-1.0, -1.0], [1.0, 1.0]))
    trunk = build_policy(config.policy, spec).trunk
    assert trunk is not None
    shapes = [tuple(p.shape) for p in theirs.parameters()]
    # Mnih et al. (2015): 84 → 20 → 9 → 7.
    assert shapes[::2] == [(32, 3, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 64 * 7 * 7)]
    assert [tuple(p.shape) for p in trunk.parameters()] == [*shapes, (512,), (512,)]  # and the LayerNorm


def test_eager_advantages_equal_ours() -> None:
    import torch
    from eager_ppo import Storage, advantages

    from embodied_rl.algorithms.advantages import gae

    rng = np.random.default_rng(0)
    steps, slots = 7, 3
    ended = rng.random((steps, slots)) < 0.3
    storage = Storage(steps, slots, 1, 1)
    storage.reward[:] = torch.from_numpy(rng.normal(size=(steps, slots)))
    storage.value[:] = torch.from_numpy(rng.normal(size=(steps, slots)))
    # Its `done` says whether a step's observation begins an episode: the step before ended one.
    storage.done[1:] = torch.from_numpy(ended[:-1]).float()
    last = rng.normal(size=slots).astype(np.float32)
    result, returns = advantages(storage, torch.from_numpy(last), torch.from_numpy(ended[-1]).float(), 0.9, 0.8)
    expected = gae(
        reward=storage.reward,
        value=storage.value,
        last_value=torch.from_numpy(last),
        terminated=torch.from_numpy(ended),
        truncated=torch.zeros(ended.shape, dtype=torch.bool),
        final_value=torch.empty(0),
        gamma=0.9,
        gae_lambda=0.8,
    )
    np.testing.assert_allclose(result.numpy(), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns.numpy(), expected[1], rtol=1e-5, atol=1e-6)


# ---- halfcheetah_peers ----------------------------------------------------------------------------------------------


def run_of(side: str, seed: int, *episodes: tuple[int, float], total_steps: int = 1000) -> Any:
    from halfcheetah_peers import Run

    steps, returns = zip(*episodes, strict=True)
    return Run(side, seed, total_steps, (), np.array(steps, np.int64), np.array(returns, np.float64))


def test_final_return_is_the_mean_of_the_last_tenth() -> None:
    run = run_of("ours", 1, (100, -5.0), (900, 7.0), (901, 1.0), (1000, 2.0), (1016, 6.0))
    assert run.final() == 3.0  # 900 is not in the last tenth; 1016 is in the last rollout, which all sides finish
    with pytest.raises(UserError, match=r"No episode of sb3 seed 4 ended in the last 10%"):
        run_of("sb3", 4, (100, 1.0)).final()


def test_curve_bins_and_interpolates() -> None:
    # 50 bins of 20 steps; centres 10, 30, 50, …
    centres, values = run_of("ours", 1, (5, 2.0), (20, 4.0), (41, 9.0), (1016, 20.0)).curve()
    np.testing.assert_allclose(centres[:3], [10.0, 30.0, 50.0])
    # Bin 0 holds both first episodes, bin 1 none: halfway between 3 and 9.
    np.testing.assert_allclose(values[:3], [3.0, 6.0, 9.0])
    # Beyond the end belongs to the last bin; from there, centre 990, straight down to bin 2, centre 50.
    assert values[-1] == 20.0
    assert values[24] == pytest.approx(9.0 + 11.0 * (490 - 50) / (990 - 50))


def test_spread_and_what_lies_within_it() -> None:
    from halfcheetah_peers import report, spread

    assert spread(np.array([1.0, 2.0, 6.0])) == pytest.approx((3.0, math.sqrt((4 + 1 + 9) / 2)))
    assert spread(np.array([4.0])) == (4.0, 0.0)
    # ours: 100 and 300, mean 200 ± 141.4; theirs: 240 and 260, mean 250 ± 14.1.
    runs = [run_of("ours", 1, (1000, 100.0)), run_of("ours", 2, (1000, 300.0))]
    runs += [run_of("sb3", 1, (1000, 240.0)), run_of("sb3", 2, (1000, 260.0))]
    lines = report(runs).splitlines()
    assert lines[1].split() == ["embodied_rl", "200", "±", "141", "over", "seeds", "(100,", "300)"]
    # 200 is 50 from 250, more than 14.1; 250 is 50 from 200, less than 141.4.
    assert lines[3] == "mean of embodied_rl lies outside stable-baselines3's mean ± std, outside its seeds' range 240 to 260"
    assert lines[4] == "mean of stable-baselines3 lies within embodied_rl's mean ± std, within its seeds' range 100 to 300"
    assert lines[-1] == "figure: final return ours 200 ± 141, stable-baselines3 250 ± 14 (ratio 0.80)"
    worse = [run_of("ours", 1, (1000, -100.0)), run_of("sb3", 1, (1000, 50.0))]
    assert report(worse).endswith("(no ratio: not both are positive)")


def test_runs_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    from halfcheetah_peers import read_run, run_missing, run_path

    def write(side: str, **head: Any) -> None:
        told = {"side": side, "seed": 1, "total_steps": 1000, "overrides": [], **head}
        run_path(tmp_path, side, 1).write_text(json.dumps(told) + '\n{"steps": 990, "return": 2.5}\n', encoding="utf-8")

    write("ours")
    write("sb3")
    runs = run_missing(tmp_path, [1], 1000)  # both are there: nothing is trained
    assert [(run.side, run.final()) for run in runs] == [("ours", 2.5), ("sb3", 2.5)]
    with pytest.raises(UserError, match="is a run of 1000 steps with overrides"):
        run_missing(tmp_path, [1], 2000)
    write("sb3", overrides=["algorithm.gamma=0.9"])
    with pytest.raises(UserError, match=r"sb3_seed1.jsonl' is a run of .*gamma=0\.9.*Choose another folder"):
        run_missing(tmp_path, [1], 1000)
    run_path(tmp_path, "sb3", 1).write_text("not JSON\n", encoding="utf-8")
    with pytest.raises(UserError, match="is not a run of this benchmark"):
        read_run(run_path(tmp_path, "sb3", 1))


def test_peer_gets_the_same_network_and_optimizer(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    import torch
    from halfcheetah_peers import run_config
    from peers import ppo_arguments, vec_env
    from stable_baselines3 import PPO

    from embodied_rl.policies.actor_critic import build_policy
    from embodied_rl.types import ActionSpec, SimSpec, TensorSpec

    config = run_config(3, 1000, tmp_path)
    envs = vec_env(config)
    try:
        model = PPO(env=envs, **ppo_arguments(config))
    finally:
        envs.close()
    spec = SimSpec("HalfCheetah-v5", {"state": TensorSpec((17,), "float64")}, ActionSpec.continuous([-1.0] * 6, [1.0] * 6))
    ours = build_policy(config.policy, spec)
    theirs = sorted(tuple(parameter.shape) for parameter in model.policy.parameters())
    assert sorted(tuple(parameter.shape) for parameter in ours.parameters() if parameter.requires_grad) == theirs
    # Actor 17-64-64-6, critic 17-64-64-1, one deviation per action.
    assert sum(math.prod(shape) for shape in theirs) == 2 * (17 * 64 + 64 + 64 * 64 + 64) + (64 * 6 + 6) + (64 + 1) + 6
    for policy in (ours, model.policy):
        # Orthogonal rows or columns times a gain: the singular values are the gain. Biases are 0.
        found = {tuple(p.shape): torch.linalg.svdvals(p.detach().double()) for p in policy.parameters() if p.ndim == 2 and p.requires_grad}
        gains = {(64, 17): math.sqrt(2.0), (64, 64): math.sqrt(2.0), (6, 64): 0.01, (1, 64): 1.0}
        assert found.keys() == gains.keys()
        for shape, gain in gains.items():
            np.testing.assert_allclose(found[shape].numpy(), gain, rtol=1e-5)
        assert all(not p.any() for p in policy.parameters() if p.ndim == 1 and p.requires_grad)  # log-deviations of 0 among them
    group = model.policy.optimizer.param_groups[0]
    assert (group["lr"], group["eps"], group["weight_decay"]) == (config.algorithm.learning_rate, config.algorithm.adam_eps, 0)
    assert (model.n_steps, model.batch_size, model.n_epochs, model.n_envs) == (256, 256, 10, 8)
    assert (model.gamma, model.gae_lambda, model.vf_coef, model.ent_coef, model.max_grad_norm) == (0.99, 0.95, 0.5, 0.0, 0.5)
    assert model.clip_range(1.0) == 0.2
    assert (envs.norm_obs, envs.norm_reward, envs.clip_obs, envs.clip_reward, envs.gamma) == (True, True, 10.0, 10.0, 0.99)


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.clip_high=0.3",
        "algorithm.target_kl=0.1",
        "algorithm.lr_schedule=linear",
        "sim.max_episode_steps=50",
        "sim.kwargs.frame_skip=2",
    ],
)
def test_what_the_peer_cannot_do_is_refused(tmp_path: Path, override: str) -> None:
    from halfcheetah_peers import run_config
    from peers import ppo_arguments

    with pytest.raises(UserError, match="stable-baselines3 cannot do the same: "):
        ppo_arguments(run_config(1, 1000, tmp_path, [override]))


# ---- learning_curves ------------------------------------------------------------------------------------------------


def test_durations_are_written_as_people_read_them() -> None:
    from learning_curves import seconds_text

    assert [seconds_text(s) for s in (0, 59.4, 59.6, 245, 3723)] == ["0:00", "0:59", "1:00", "4:05", "1:02:03"]


def test_rows_of_the_table() -> None:
    from learning_curves import table_row

    results: dict[str, Any] = {
        "success": 0.97,
        "success_interval_95": [0.9155, 0.9898],
        "num_episodes": 100,
        "steps": 120_000,
        "train_wall_clock_s": 100.0,
        "wall_clock_s": 125.0,
    }
    assert table_row("push", 3, results) == ["push", "3", "97.0% of 100 (91.5–99.0%)", "120,000", "1:40", "2:05", "1,200"]
    run = {**results, "success": None, "return_mean": 1234.56, "return_mean_interval_95": [1200.0, 1300.0]}
    assert table_row("run", 1, run)[2] == "return 1235 (1200 to 1300)"


def test_curves_are_read_and_averaged_where_all_have_points(tmp_path: Path) -> None:
    from learning_curves import NUM_POINTS, mean_curve, read_curve

    logger = JsonlLogger(tmp_path)
    logger.log(10, {"episode/return": 1.0})
    logger.log(20, {"episode/return": 2.0, "episode/success": 0.5})
    logger.log(30, {"episode/return": 3.0, "episode/success": float("nan")})
    logger.log(40, {"eval/success": 1.0})
    logger.log(50, {"episode/return": 5.0, "episode/success": 0.75})
    logger.close()
    metric, steps, values = read_curve(tmp_path)
    assert metric == "episode/success"  # stands before the return; a gap is left out
    np.testing.assert_array_equal(steps, [20, 50])
    np.testing.assert_array_equal(values, [0.5, 0.75])
    # y = x on [0, 100] and y = 3 x on [40, 200]: the mean is 2 x on [40, 100].
    grid, mean = mean_curve([(np.array([0, 100]), np.array([0.0, 100.0])), (np.array([40, 200]), np.array([120.0, 600.0]))])
    assert (grid[0], grid[-1], grid.size) == (40.0, 100.0, NUM_POINTS)
    np.testing.assert_allclose(mean, 2 * grid)
    nothing = mean_curve([(np.array([0, 10]), np.array([0.0, 1.0])), (np.array([20, 30]), np.array([0.0, 1.0]))])
    assert [part.size for part in nothing] == [0, 0]
    empty = JsonlLogger(tmp_path / "empty")
    empty.log(10, {"train/policy_loss": 1.0})
    empty.close()
    with pytest.raises(UserError, match="no episode ended"):
        read_curve(tmp_path / "empty")


def test_unknown_experiment_names_the_nearest() -> None:
    command = [sys.executable, str(BENCHMARKS / "learning_curves.py"), "--experiments", "cartpol"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Experiment 'cartpol' is not known. Did you mean 'cartpole'?")
