"""check_sim: good simulators pass, and each broken promise is caught by the check that is named after it, and by no other."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from embodied_rl.commands import catalog
from embodied_rl.config import load_sim_config
from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.sim.check import CHECKS, CheckReport, CheckResult, check_sim
from embodied_rl.sim.checks.episodes import Part, Player, Trajectory, difference, random_actions
from embodied_rl.sim.checks.rows import WatchedRows, poison, unwritten, watched_buffers
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec, VariableSpec
from tests.short_run import one_line_error
from tests.sim.check_toys import CapturingEnv, Puck, SplitPuck, vector_cartpole

NAMES = [name for name, _, _ in CHECKS]
PUCK = "tests.sim.check_toys:Puck"


def check_puck(fault: str, new_processes: bool = False, **kwargs: Any) -> CheckReport:
    factory = SimFactory(PUCK, kwargs={"fault": fault, **kwargs})
    return check_sim(factory, steps=25, continuation_steps=60, longest_episode=200, new_processes=new_processes)


# ---- good simulators ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots", ["exact", "replay", "none"])
def test_a_good_simulator_passes_everything(snapshots: str) -> None:
    report = check_puck("", new_processes=True, snapshots=snapshots)
    assert report.ok, report
    assert [result.name for result in report.results] == ["build", *NAMES]
    skipped = {result.name for result in report.results if result.outcome == "skip"}
    not_asked = {
        "exact": {"replay"},
        "replay": {"snapshot", "snapshot_new_process"},
        "none": {"snapshot", "snapshot_new_process", "replay"},
    }
    assert skipped == not_asked[snapshots]


@pytest.mark.parametrize("name", ["cartpole", "halfcheetah", "pixel_reach"])
def test_simulators_of_this_package_pass(name: str) -> None:
    if name == "pixel_reach" and mujoco_backend() is None:
        pytest.skip("MuJoCo cannot draw off-screen here")
    config = load_sim_config(name)
    report = check_sim(SimFactory(config.target, config.task, config.kwargs, config.extra), steps=40, continuation_steps=80)
    assert report.ok, report
    assert report["new_process"].outcome == "pass"
    assert report["snapshot_new_process"].outcome == "pass"
    assert "80 steps" in report["snapshot"].detail


@pytest.mark.slow
def test_maniskill_passes() -> None:
    config = load_sim_config("maniskill_pushcube")
    try:
        report = check_sim(SimFactory(config.target, config.task, config.kwargs, config.extra), num_envs=2, steps=50)
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert report.ok, report
    assert report["new_process"].outcome == "pass"


def test_gymnasium_classes_and_vector_environments_pass() -> None:
    """A class of gymnasium is checked through its adapter, which keeps its draws from the global generator apart."""
    single = check_sim(CapturingEnv, steps=40)
    assert single.ok, single
    assert single["new_process"].outcome == "pass"
    vector = check_sim(vector_cartpole, steps=40)
    assert vector.ok, vector
    assert vector["siblings"].outcome == "pass"


def test_what_cannot_be_imported_elsewhere_skips_new_processes_alone() -> None:
    report = check_sim(lambda num_envs: Puck(num_envs), steps=30)
    assert report.ok, report
    assert {result.name for result in report.results if result.outcome == "skip"} == {"new_process", "snapshot_new_process", "replay"}
    assert "cannot import this factory" in report["new_process"].detail
    named = check_sim(partial(Puck, limit=40), steps=30)
    assert named["new_process"].outcome == "pass", "a partial of an importable class can be"


def test_one_environment_has_no_neighbours() -> None:
    report = check_sim(partial(Puck), num_envs=1, steps=30, new_processes=False)
    assert report.ok, report
    assert {name for name in NAMES if report[name].detail == "needs num_envs >= 2"} == {"other_rows", "siblings", "order", "place"}


# ---- broken ones ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [
        ("infinite_bounds", "spec", "action bounds must be finite"),
        ("unseeded_noise", "determinism", r"observation 'state' differs first at step 1; largest difference \d"),
        ("carries_over", "history", "does not mend it"),
        ("leaves_velocity", "spaces", "`reset` leaves observation 'state' unwritten in 3 of 9 places"),
        ("leaves_reward", "spaces", "`step` leaves reward unwritten"),
        ("nan", "spaces", "NaN or infinity in observation 'state' of environment 0 at step 10"),
        ("stretches", "spaces", r"a value of shape \(1,\) is stretched over \(3,\)"),
        ("float_picture", "spaces", "float64 values do not fit uint8 and are cut"),
        ("breaks_at_the_bounds", "actions", "gives NaN or infinity"),
        ("writes_every_row", "other_rows", "`step` of environment 1 writes reward of environment 0"),
        ("reset_writes_reward", "other_rows", "`reset` writes reward"),
        ("keeps_action", "kept_rows", "with rows and actions overwritten"),
        ("reads_its_row", "kept_rows", "with rows and actions overwritten"),
        ("strange_info", "info", "info 'contact' is a object"),
        ("ignores_seed", "seeds", "all give the same episode"),
        ("small_seeds_only", "seeds", r"raised OverflowError: seed does not fit 30 bits \(check_toys.py:\d+ in reset\)"),
        ("feels_neighbour", "siblings", "without its neighbours: environment 0"),
        ("depends_on_place", "place", "played by the next environment of the process: environment 0"),
        ("no_limit", "step_limit", "max_episode_steps=150, but environment 0 continues after step 150"),
        ("confused_after_end", "reset_after_end", "after an episode that ended by itself"),
        ("resets_by_itself", "no_autoreset", r"at its end \(step 150\) is the first of another episode"),
        ("float_frame", "render", r"must return \[H, W, 3\] uint8, got \[8, 10, 3\] float32"),
        ("render_steps", "render", "with frames drawn between steps"),
        ("saves_float32", "snapshot", "the spec says 'exact'"),
        ("forgets_steps", "snapshot", "restored in the same environment"),
        ("accepts_anything", "snapshot", "accepts bytes that are not a snapshot"),
        ("closes_once", "close", "raised RuntimeError: already closed"),
    ],
)
def test_each_fault_is_caught_by_its_check_alone(fault: str, check: str, says: str) -> None:
    # What is not part of the snapshot would fail that as well.
    report = check_puck(fault, snapshots="none" if fault in ("keeps_action", "reads_its_row") else "exact")
    assert report.failed == (check,), report
    assert re.search(says, report[check].detail), report[check].detail
    assert not report.ok


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("", "observed after every 4 steps and at their ends: 3 episodes of 40 steps, bit by bit"),
        ("looks_and_moves", "observed only after every 4 steps: environment 0: 'reward' differs first at step 2"),
        ("rewards_what_is_seen", "observed only after every 4 steps: environment 0: 'reward' differs first at step 2"),
    ],
)
def test_observations_that_are_left_out_change_nothing(fault: str, says: str) -> None:
    report = check_sim(partial(SplitPuck, fault=fault), steps=40, new_processes=False)
    assert report["unread"].outcome == ("fail" if fault else "pass"), report
    assert re.search(says, report["unread"].detail), report["unread"].detail
    assert fault or report.ok, report


def test_rows_that_are_mixed_up_show_in_reverse_order() -> None:
    assert "order" in check_puck("mixes_up_rows").failed


def test_the_global_generator_shows_where_it_is_disturbed_and_between_siblings() -> None:
    """GEM's trap: reset seeds the process-wide generator, so that whoever was reset last decides everybody's noise."""
    assert {"siblings", "order", "global_random"} <= set(check_puck("global_random", snapshots="none").failed)


def test_what_only_a_new_process_shows() -> None:
    report = check_puck("random_hash", new_processes=True)
    assert report.failed == ("new_process",), report
    assert report["snapshot_new_process"].outcome == "skip"
    kept = check_puck("keeps_snapshots_here", new_processes=True)
    assert kept.failed == ("snapshot_new_process",), kept
    assert "KeyError" in kept["snapshot_new_process"].detail


def test_a_replay_that_is_not_exact_is_told() -> None:
    report = check_puck("unseeded_late", snapshots="replay")
    assert report.failed == ("replay",), report
    assert "snapshots='none'" in report["replay"].detail


def test_an_end_by_termination_may_not_reset_either() -> None:
    """Thrown off the ice at 0.3 m beyond where episodes begin: the last position must be out there."""
    good = check_sim(SimFactory(PUCK, kwargs={"out_of": 3.2, "snapshots": "none"}), steps=50, longest_episode=2000, new_processes=False)
    assert good["no_autoreset"].outcome == "pass", good
    kwargs = {"out_of": 3.2, "limit": 5000, "fault": "resets_by_itself", "snapshots": "none"}
    report = check_sim(SimFactory(PUCK, kwargs=kwargs), steps=50, longest_episode=4000, new_processes=False)
    assert report.failed == ("no_autoreset",), report
    assert "is the first of another episode" in report["no_autoreset"].detail


def test_a_history_that_reconfigure_mends_is_reported_and_used() -> None:
    report = check_puck("mended_by_reconfigure")
    assert report.ok, report
    assert report["history"].detail.startswith("exact with options={'reconfigure': True}; after a plain reset observation 'state' differs")


def test_an_approximate_snapshot_reports_its_drift() -> None:
    report = check_puck("saves_float32", snapshots="approximate")
    assert report.ok, report
    assert report["snapshot"].detail.startswith("approximate, as the spec says")
    drift = float(report["snapshot"].detail.split("largest difference ")[1].split(";")[0])
    # Positions below 2 m are rounded by at most 2**-24 m when saved as float32; 150 steps of 0.1 s carry the velocity's on.
    assert 0 < drift < 1e-5


def test_what_fails_while_it_is_built_is_a_report_and_a_mistake_is_a_user_error() -> None:
    report = check_puck("raises_while_built")
    assert report.failed == ("build",)
    assert "raised RuntimeError: no such motor (check_toys.py:" in report["build"].detail
    with pytest.raises(UserError, match="needs ice"):
        check_puck("user_error")
    with pytest.raises(ValueError, match=r"num_envs must be >= 1, got 0"):
        check_sim(partial(Puck), num_envs=0)


def test_the_process_wide_generators_are_given_back() -> None:
    import random

    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    expected = np.random.RandomState(3).uniform(), random.Random(3).random()
    check_sim(partial(Puck), steps=20, new_processes=False)
    assert (np.random.uniform(), random.random()) == expected  # noqa: NPY002


# ---- the parts ------------------------------------------------------------------------------------------------------


def trajectory(states: list[list[float]], rewards: list[float]) -> Trajectory:
    steps = len(rewards)
    flags = {name: [np.bool_(False)] * steps for name in ("terminated", "truncated", "success")}
    return Trajectory({"state": [np.array(row) for row in states]}, {"reward": [np.float32(r) for r in rewards], **flags})


def test_differences_are_told_where_they_begin_and_how_large_they_get() -> None:
    expected = trajectory([[0, 0], [1, 0], [2, 0]], [1, 1])
    assert difference(expected, trajectory([[0, 0], [1, 0], [2, 0]], [1, 1])) is None
    found = difference(expected, trajectory([[0, 0], [1, 0.25], [2, -3]], [1, 1.5]))
    assert found is not None
    assert (found.what, found.step, found.drift) == ("observation 'state'", 1, 3.0)
    found = difference(expected, trajectory([[0, 0], [1, 0], [2, 0]], [1, 4]))
    assert found is not None
    assert (found.what, found.step, found.drift) == ("'reward'", 2, 3.0)
    found = difference(expected, trajectory([[0, 0], [1, 0]], [1]))
    assert found is not None
    assert found.what == "the length, 1 steps instead of 2,"
    assert difference(trajectory([[0.0]], []), trajectory([[-0.0]], [])) is not None, "bit by bit: minus zero is another number"
    assert difference(trajectory([[np.nan]], []), trajectory([[np.nan]], [])) is None
    # After a restore the first row belongs to a later step.
    found = difference(expected.tail(1), trajectory([[2.5, 0]], [1]), first_step=2)
    assert found is not None
    assert (found.step, found.drift) == (2, 0.5)


def test_trajectories_survive_the_way_from_a_new_process() -> None:
    original = trajectory([[0.1, np.nan], [1e-300, -0.0]], [0.5])
    original.observation["text"] = [np.array(text.encode()) for text in ('two "words"\n', "ö")]
    loaded = Trajectory(**decode_state(encode_state(vars(original))))
    assert difference(original, loaded) is None
    assert loaded.observation["text"] == original.observation["text"]


def test_poison_finds_what_was_not_written() -> None:
    spec = SimSpec(
        "x", {"a": TensorSpec((3,)), "b": TensorSpec((2,), "bool"), "c": TensorSpec((2,), "int8"), "t": VariableSpec("text")},
        ActionSpec.discrete(2),
    )  # fmt: skip
    runs = []
    for which in (0, 1):
        out = StepBuffers.allocate(spec, 1)
        poison(out, which)
        out.observation["a"][0, 1] = np.nan  # written, though with one of the poisons
        out.observation["b"][0, 0] = False
        out.observation["c"][0, 1] = 17
        runs.append(out.observation)
    assert unwritten(runs[0]["a"], runs[1]["a"]).tolist() == [[True, False, True]]
    assert unwritten(runs[0]["b"], runs[1]["b"]).tolist() == [[False, True]]
    assert unwritten(runs[0]["c"], runs[1]["c"]).tolist() == [[True, False]]
    assert unwritten(runs[0]["t"], runs[1]["t"]).tolist() == [True]


def test_watched_rows_note_what_numpy_lets_pass() -> None:
    out, notes = watched_buffers(SimSpec("x", {"a": TensorSpec((3,)), "p": TensorSpec((2, 2), "uint8")}, ActionSpec.discrete(2)), 2)
    assert isinstance(out.observation["a"], WatchedRows)
    out.observation["a"][0] = np.arange(3.0)
    out.observation["a"][[0, 1]] = np.ones((2, 3))
    out.observation["a"][1][:] = 2.0
    out.observation["p"][0] = 255
    out.observation["p"][0] = np.full((2, 2), 7.0)  # whole numbers fit
    assert notes == []
    out.observation["p"][0] = 256 * np.ones((2, 2), np.int64) - 1
    assert notes == []
    out.observation["p"][1] = np.full((2, 2), 300.0)
    out.observation["a"][1][:] = np.zeros(1)
    assert len(notes) == 2
    assert "observation 'p': float64 values do not fit uint8" in notes[0]
    assert "observation 'a': a value of shape (1,)" in notes[1]


def test_a_player_stops_where_episodes_end() -> None:
    sim = Puck(2, limit=4)
    player = Player(sim, 2)
    parts = {0: Part(1, random_actions(sim.spec, 10, 1)), 1: Part(2, random_actions(sim.spec, 3, 2))}
    player.reset(parts)
    played = player.run(10)
    assert [played[0].num_steps, played[1].num_steps] == [4, 3], "one ends by itself, the other runs out of actions"
    assert played[0].ended
    assert not played[1].ended
    # By hand: x0 from the seed's generator, then v += 0.1 a + noise, x += 0.1 v.
    rng = np.random.default_rng(1)
    position, velocity = rng.uniform(-1, 1), 0.0
    for step in range(4):
        velocity += 0.1 * float(parts[0].actions[step, 0]) + rng.normal(0, 0.01)
        position += 0.1 * velocity
        np.testing.assert_allclose(played[0].observation["state"][step + 1], [position, velocity, step + 1], rtol=1e-12)


def test_the_report_counts_and_prints() -> None:
    results = (CheckResult("a", "pass", "fine", 0.5), CheckResult("long_name", "fail", "wrong", 0.25), CheckResult("b", "skip", "no", 0.0))
    report = CheckReport("toy", 3, results)
    assert (report.ok, report.failed) == (False, ("long_name",))
    assert str(report).splitlines() == [
        "toy, 3 environments in one process",
        "  ok    a            0.50 s  fine",
        "  FAIL  long_name    0.25 s  wrong",
        "  skip  b            0.00 s  no",
        "1 passed, 1 failed, 1 skipped.",
    ]
    assert json.loads(json.dumps(report.to_dict()))["results"][1] == {
        "name": "long_name",
        "outcome": "fail",
        "detail": "wrong",
        "seconds": 0.25,
    }


# ---- the command line -----------------------------------------------------------------------------------------------


def test_the_command_checks_and_its_exit_status_tells(capsys: pytest.CaptureFixture[str]) -> None:
    catalog.main(["check", "cartpole", "task=MountainCar-v0", "steps=20", "num_envs=2", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["task"], document["num_envs"], document["ok"]) == ("MountainCar-v0", 2, True)
    with pytest.raises(SystemExit) as stopped:
        catalog.main(["check", "custom", f"target={PUCK}", "sim.kwargs.fault=writes_every_row", "kwargs.limit=60", "steps=20"])
    assert stopped.value.code == 1
    captured = capsys.readouterr()
    assert "  FAIL  other_rows" in captured.out
    assert captured.err.splitlines()[-1] == "error: 'custom' fails these tests: other_rows."  # A slow machine is told how far it is before.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Argument SIM is missing"),
        (["steps=3"], "Argument SIM is missing"),
        (["cartpol"], "Simulator 'cartpol' is not known. Did you mean 'cartpole'?"),
        (["custom"], "sim.target must be given for a simulator of your own"),
        (["cartpole", "stepz=3"], "Argument 'stepz' is not known. Did you mean 'steps'?"),
        (["cartpole", "steps=3", "sim.steps=4"], "'steps' is given twice: '3' and '4'. Remove one."),
        (["cartpole", "steps=0"], "steps must be between 1 and 1,000,000, got 0."),
        (["cartpole", "task"], "Argument 'task' is not of the form key=value."),
        (["cartpole", "kwargs.x=[1"], "The value of 'kwargs.x' cannot be read: '[1'."),
        (["cartpole", "kwargs.gravity=3"], "'CartPole-v1' cannot be made with"),
        (["tests.sim.check_toys:Pack"], "Did you mean 'Puck'?"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in one_line_error(catalog.main, ["check", *arguments], capsys)
