"""The gymnasium adapter against gymnasium itself, and against environments whose every number is known."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.sim.factory import SimFactory, adapt
from embodied_rl.sim.faults import WrongShapeError
from embodied_rl.sim.robots import gymnasium as adapter
from embodied_rl.sim.robots.gymnasium import GymnasiumSim, VectorEnvSim
from embodied_rl.sim.robots.spaces import action_converter
from embodied_rl.types import StepBuffers, TensorSpec
from tests.sim.robots.trajectories import actions_for, assert_depends_on_seed_alone, episode


class Known(gymnasium.Env):
    """Every output follows from the seed, the step and the action."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(
            {
                "arm": spaces.Dict({"joints": spaces.Box(-9, 9, (2, 2)), "grip": spaces.Discrete(3, start=1)}),
                "camera": spaces.Box(0, 255, (4, 5, 3), np.uint8),
            }
        )
        self.action_space = spaces.Box(-2, 2, (3,), np.float64)

    def _observation(self) -> dict[str, Any]:
        joints = np.array([[self.seed, self.t], [0.5, -0.5]])
        return {"arm": {"joints": joints, "grip": 1 + self.t % 3}, "camera": np.full((4, 5, 3), self.t, np.uint8)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.seed, self.t = seed, 0
        return self._observation(), {"is_success": 0.0}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action.dtype == np.float64
        self.t += 1
        self.last_action = action
        return self._observation(), float(action.sum()), self.t == 4, self.t == 3, {"is_success": float(self.t == 2), "t": self.t}

    def render(self) -> np.ndarray:
        return np.full((6, 7, 3), 9, np.uint8)


class UsesGlobalRandom(gymnasium.Env):
    """Draws from numpy's and Python's process-wide generators, as some simulators do, while resetting and stepping."""

    def __init__(self, while_stepping: bool) -> None:
        self.while_stepping = while_stepping
        self.observation_space = spaces.Box(-9, 9, (2,))
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.place = np.array([np.random.normal(), random.random()])  # noqa: NPY002
        return self.place, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.while_stepping:
            self.place = self.place + np.array([np.random.normal(), random.random()])  # noqa: NPY002
        return self.place, 0.0, False, False, {}


def test_every_number_lands_in_its_row() -> None:
    sim = GymnasiumSim([Known("rgb_array") for _ in range(3)], task="known")
    assert sim.spec.observation == {
        "arm.grip": TensorSpec((3,)),
        "arm.joints": TensorSpec((4,)),
        "camera": TensorSpec((4, 5, 3), "uint8"),
    }
    assert (sim.spec.action.low, sim.spec.action.high) == ((-2.0,) * 3, (2.0,) * 3)
    assert (sim.spec.reports_success, sim.spec.can_render, sim.spec.control_hz, sim.spec.max_episode_steps) == (True, True, 5.0, None)
    out = StepBuffers.allocate(sim.spec, 3)
    sim.reset([2, 0], [12, 10], out)
    np.testing.assert_array_equal(out.observation["arm.joints"], [[10, 0, 0.5, -0.5], [0, 0, 0, 0], [12, 0, 0.5, -0.5]])
    np.testing.assert_array_equal(out.observation["arm.grip"], [[1, 0, 0], [0, 0, 0], [1, 0, 0]])
    for _ in range(2):
        sim.step([2, 0], np.array([[1, 2, 0.5], [0, -1, 0.25]], np.float32), out)
    np.testing.assert_array_equal(out.reward, np.array([-0.75, 0.0, 3.5], np.float32))
    np.testing.assert_array_equal(out.success, [True, False, True])
    np.testing.assert_array_equal(out.observation["arm.grip"], [[0, 0, 1], [0, 0, 0], [0, 0, 1]])
    np.testing.assert_array_equal(out.observation["camera"][:, 0, 0, 0], [2, 0, 2])
    assert out.info[0] == {"is_success": 1.0, "t": 2}
    assert out.info[1] is None
    sim.step([2], np.zeros((1, 3), np.float32), out)
    assert (out.truncated.tolist(), out.success.tolist()) == ([False, False, True], [True, False, False])
    sim.step([2], np.zeros((1, 3), np.float32), out)
    assert (out.truncated.tolist(), out.terminated.tolist()) == ([False] * 3, [False, False, True])
    assert sim.render(1).shape == (6, 7, 3)


def test_an_environment_keeps_its_own_copy_of_the_action() -> None:
    sim = GymnasiumSim([Known()])
    out, actions = StepBuffers.allocate(sim.spec, 1), np.ones((1, 3), np.float64)
    sim.reset([0], [0], out)
    sim.step([0], actions, out)
    actions[:] = 7  # what the next message in shared memory does
    np.testing.assert_array_equal(sim.envs[0].unwrapped.last_action, [1, 1, 1])  # type: ignore[attr-defined]


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_equal_to_gymnasium_step_by_step(task: str) -> None:
    sim = adapter.make(task, 2)
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [3, 4], out)
    plain = gymnasium.make(task)
    observation, _ = plain.reset(seed=4)
    np.testing.assert_array_equal(out.observation["state"][1], np.asarray(observation, np.float32))
    for action in actions_for(sim, 30):
        sim.step([0, 1], np.stack([action, action]), out)
        expected = plain.step(int(action[0]) if task == "CartPole-v1" else action)
        np.testing.assert_array_equal(out.observation["state"][1], np.asarray(expected[0], np.float32))
        assert (out.reward[1], out.terminated[1], out.truncated[1]) == (np.float32(expected[1]), expected[2], expected[3])
        if expected[2]:
            break
    assert plain.spec is not None
    assert sim.spec.max_episode_steps == plain.spec.max_episode_steps
    assert not sim.spec.reports_success


def test_time_limit_truncates() -> None:
    sim = adapter.make("Pendulum-v1", 1, max_episode_steps=5)
    assert sim.spec.max_episode_steps == 5
    record = episode(sim, 1, {0: 0}, 5)[0]
    assert [row[-2] for row in record[1:]] == [0, 0, 0, 0, 1]  # truncated


def test_episodes_depend_on_their_seed_alone() -> None:
    assert_depends_on_seed_alone(adapter.make("Pendulum-v1", 2))


@pytest.mark.parametrize("while_stepping", [False, True])
def test_process_wide_generators_are_kept_apart(while_stepping: bool) -> None:
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    expected = np.random.random(), random.random()  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    sim = GymnasiumSim([UsesGlobalRandom(while_stepping) for _ in range(2)])
    assert sim._draws_while_stepping == while_stepping
    assert_depends_on_seed_alone(sim)
    assert (np.random.random(), random.random()) == expected, "the process's own generators moved"  # noqa: NPY002


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Sequence(spaces.Discrete(3)), "Sequence"),
        (spaces.Dict({"words": spaces.Sequence(spaces.Discrete(3))}), "under 'words'"),
        (spaces.Dict({}), "'UsesGlobalRandom' has an empty observation"),
        (spaces.Box(0, 255, (0, 0, 3), np.uint8), "has an empty observation"),
        (spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)}), "a.b": spaces.Discrete(2)}), "two parts named 'a.b'"),
    ],
)
def test_observation_spaces_that_cannot_be_adapted_are_named(space: spaces.Space, words: str) -> None:
    env = UsesGlobalRandom(False)
    env.observation_space = space
    with pytest.raises(UserError, match=words):
        GymnasiumSim([env])


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(-np.inf, np.inf, (2,)), "no finite bounds"),
        (spaces.Box(-1e300, 1e300, (2,), np.float64), "no finite bounds"),  # of float32
        (spaces.Box(-1, 1, (0,)), "is empty"),
        (spaces.MultiDiscrete([2, 3]), r"MultiDiscrete\(\[2 3\]\)"),
    ],
)
def test_action_spaces_that_cannot_be_adapted_are_named(space: spaces.Space, words: str) -> None:
    env = UsesGlobalRandom(False)
    env.action_space = space
    with pytest.raises(UserError, match=words):
        GymnasiumSim([env])


def test_discrete_actions_keep_their_start() -> None:
    class Shifted(UsesGlobalRandom):
        def step(self, action: int) -> Any:
            return self.place, float(action), False, False, {}

    env = Shifted(False)
    env.action_space = spaces.Discrete(3, start=5)
    sim = GymnasiumSim([env])
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    sim.step([0], np.array([[2]], np.int64), out)
    assert (sim.spec.action.num_actions, out.reward[0]) == (3, 7.0)


def test_dictionary_actions_are_split_by_key() -> None:
    class TwoArms(UsesGlobalRandom):
        def step(self, action: Any) -> Any:
            return self.place, float(action["left"].sum() * 10 + action["right"].sum()), False, False, {}

    env = TwoArms(False)
    env.action_space = spaces.Dict({"left": spaces.Box(-1, 1, (2,)), "right": spaces.Box(-3, 3, (1,))})
    sim = GymnasiumSim([env])
    assert (sim.spec.action.dim, sim.spec.action.high) == (3, (1.0, 1.0, 3.0))
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    sim.step([0], np.array([[0.25, 0.5, 2.0]], np.float32), out)
    assert out.reward[0] == 0.75 * 10 + 2


def test_unknown_task_offers_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'HalfCheetha-v5' is not known. Did you mean 'HalfCheetah-v5'"):
        adapter.make("HalfCheetha-v5", 1)


def test_the_package_that_an_id_names_is_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swings.py").write_text(
        "import gymnasium\ngymnasium.register('Swing-v0', 'gymnasium.envs.classic_control.pendulum:PendulumEnv', max_episode_steps=30)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        spec = adapter.make("swings:Swing-v0", 2).spec
        assert (spec.task, spec.max_episode_steps, spec.action.dim) == ("Swing-v0", 30, 1)
        assert spec.snapshots == "exact"  # the task behind it is gymnasium's own
        with pytest.raises(UserError, match=r"'Swing-v1' is not known. Did you mean 'Swing-v0'"):
            adapter.make("swings:Swing-v1", 1)
    finally:
        gymnasium.registry.pop("Swing-v0", None)
        sys.modules.pop("swings", None)
    with pytest.raises(UserError, match=r"'swimgs:Swing-v0' names a package that cannot be imported: No module named 'swimgs'"):
        adapter.make("swimgs:Swing-v0", 1)


def test_unknown_argument_is_one_line() -> None:
    with pytest.raises(UserError, match=r"'CartPole-v1' cannot be made with {'lenght': 2}: .*unexpected keyword argument 'lenght'"):
        SimFactory("embodied_rl.sim.robots.gymnasium:make", "CartPole-v1", {"lenght": 2}).make(1)


def test_a_task_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gymnasium.envs.classic_control.cartpole", None)
    monkeypatch.delattr("gymnasium.envs.classic_control.CartPoleEnv")
    monkeypatch.setattr(gymnasium.registry["CartPole-v1"], "entry_point", "gymnasium.envs.classic_control.cartpole:CartPoleEnv")
    with pytest.raises(MissingExtraError, match="pip install"):
        adapter.make("CartPole-v1", 1)


def test_newest_versions() -> None:
    assert adapter.newest(["A-v1", "A-v10", "A-v2", "B-v0", "plain"]) == ["A-v10", "B-v0", "plain"]
    assert "CartPole-v1" in adapter.tasks()
    assert "CartPole-v0" not in adapter.tasks()


def test_rendering_that_was_not_asked_for_is_an_error() -> None:
    sim = adapter.make("CartPole-v1", 1, render_mode=None)
    with pytest.raises(UserError, match="render_mode"):
        sim.render(0)


# ---- vector environments ----


def make_vector(num_envs: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1", max_episode_steps=6) for _ in range(num_envs)], autoreset_mode=mode)


def test_a_vector_environment_equals_single_ones() -> None:
    vector = adapt(make_vector, 3, None, {})
    single = adapter.make("Pendulum-v1", 3, max_episode_steps=6)
    assert isinstance(vector, VectorEnvSim)
    out, expected = StepBuffers.allocate(vector.spec, 3), StepBuffers.allocate(single.spec, 3)
    for sim, buffers in ((vector, out), (single, expected)):
        sim.reset([0, 1, 2], [5, 6, 7], buffers)
    actions = actions_for(single, 12).reshape(12, 1, 1).repeat(3, axis=1)
    for t, action in enumerate(actions):
        vector.step([0, 1, 2], action, out)
        single.step([0, 1, 2], action, expected)
        np.testing.assert_array_equal(out.observation["state"], expected.observation["state"])
        np.testing.assert_array_equal(out.reward, expected.reward)
        np.testing.assert_array_equal(out.truncated, expected.truncated)
        if t == 3:  # one starts anew in the middle of the others' episodes
            for sim, buffers in ((vector, out), (single, expected)):
                sim.reset([1], [99], buffers)
                assert out.observation["state"][1].any()
        if t in (5, 11):
            assert expected.truncated.tolist() == [True, False, True]
            for sim, buffers in ((vector, out), (single, expected)):
                sim.reset([0, 2], [8, 9], buffers)
        if t == 9:
            assert expected.truncated.tolist() == [False, True, False]
            for sim, buffers in ((vector, out), (single, expected)):
                sim.reset([1], [3], buffers)
    vector.close()


def test_actions_of_whole_numbers_are_rounded() -> None:
    convert = action_converter(gymnasium.spaces.Box(-2, 2, (3,), np.int8))
    assert convert(np.array([[1.6, -1.6, 0.4]], np.float32)).tolist() == [[2, -2, 0]]
    switches = action_converter(gymnasium.spaces.Box(0, 1, (2,), np.bool_))
    assert switches(np.array([[0.4, 0.6]], np.float32)).tolist() == [[False, True]]


def test_a_vector_environment_that_resets_by_itself_is_refused() -> None:
    env = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
    with pytest.raises(UserError, match=r"resets automatically.*Disabled.*vectorization_mode='sync'"):
        VectorEnvSim(env)


class OddBatch(VectorEnv):
    """Three environments; the second step answers with `then`."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    single_observation_space, single_action_space = spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1,))
    action_space = spaces.Box(-1, 1, (3, 1))
    num_envs = 3

    def __init__(self, **then: Any) -> None:
        self.then, self.t = then, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros((3, 2)), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        no: np.ndarray = np.zeros(3, bool)
        good = {"observation": np.zeros((3, 2)), "reward": np.zeros(3), "terminated": no, "truncated": no, "info": {"success": no}}
        return tuple((good | self.then if self.t == 2 else good).values())


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("observation", np.zeros((1, 2)), "index 1 is out of bounds"),
        ("observation", np.zeros((3, 1)), r"'state' has the shape \(1,\), not \(2,\)"),
        ("reward", np.ones(1), r"reward has the shape \(1,\), not \(3,\)"),
        ("truncated", True, r"truncated has the shape \(\), not \(3,\)"),
        ("info", {"success": np.array([True])}, "success has the shape"),
        ("info", None, "no attribute"),
    ],
)
def test_a_batch_that_is_not_as_declared_is_named(part: str, value: Any, words: str) -> None:
    sim = VectorEnvSim(OddBatch(**{part: value}))
    out = StepBuffers.allocate(sim.spec, 3)
    sim.reset([0, 1, 2], [0, 1, 2], out)
    sim.step([0, 1, 2], np.zeros((3, 1)), out)
    with pytest.raises(WrongShapeError, match=f"A step of 'OddBatch' is not what its spaces .*{words}"):
        sim.step([0, 1, 2], np.zeros((3, 1)), out)
    with pytest.raises(UserError, match="has 3 environments, and 2 were asked for"):
        adapt(lambda num_envs: OddBatch(), 2, None, {})


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_of_an_older_gym_is_named(method: str) -> None:
    class Old(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Box(-1, 1, (1,))

        def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
            return np.zeros(2) if method == "reset" else (np.zeros(2), {})

        def step(self, action: np.ndarray) -> Any:
            return np.zeros(2), 0.0, False, {}

    with pytest.raises(UserError, match=rf"`{method}` must return \(observation, .*info\).* got "):
        GymnasiumSim([Old()])


class Odd(gymnasium.Env):
    """Answers as told; from step `late` on with the values of `then`."""

    def __init__(self, space: Any = spaces.Box(-1, 1, (2,)), late: int = 0, **then: Any) -> None:  # noqa: B008
        self.observation_space, self.action_space = space, spaces.Box(-1, 1, (1,))
        self.good = {"observation": space.sample(), "reward": 0.0, "terminated": False, "truncated": False, "info": {"success": None}}
        self.late, self.then, self.t = late, then, 0
        self.render_mode = "rgb_array"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._now("observation"), {}

    def step(self, action: np.ndarray) -> Any:
        self.t += 1
        return tuple(self._now(part) for part in self.good)

    def _now(self, part: str) -> Any:
        return self.then.get(part, self.good[part]) if self.t >= self.late else self.good[part]

    def render(self) -> Any:
        return self.then["frame"]


PICTURE = spaces.Box(0, 255, (2, 2, 3), np.uint8)
NOT_AS_DECLARED: list[tuple[Any, Any, str]] = [
    (spaces.Box(-1, 1, (2,)), np.zeros(3), r"'state' has the shape \(3,\), not \(2,\)"),
    (spaces.Box(-1, 1, (2,)), 0.5, r"'state' has the shape \(\), not \(2,\)"),  # numpy would write it twice
    (spaces.Box(-1, 1, (2, 3)), np.zeros((3, 2)), r"shape \(3, 2\), not \(2, 3\)"),
    (spaces.Box(-1, 1, (2,)), [None, 1.0], "'state' holds no real numbers"),
    (PICTURE, np.full((2, 2, 3), 0.5), "'rgb' must hold whole numbers from 0 to 255 .* float64 such as 0.5"),
    (PICTURE, np.full((2, 2, 3), 256), "'rgb' must hold whole numbers from 0 to 255 .* int64 such as 256"),
    (spaces.Discrete(3), -1, r"'state' is -1, which is not in Discrete\(3\)"),  # the last one for numpy
    (spaces.MultiDiscrete([2, 2]), np.array([0, 2]), r"which is not in MultiDiscrete\(\[2 2\]\)"),
    (spaces.Dict(a=PICTURE, b=PICTURE), {"a": np.zeros((2, 2, 3), np.uint8)}, "'b' is missing"),
]


@pytest.mark.parametrize(("space", "value", "words"), NOT_AS_DECLARED)
def test_an_observation_outside_its_space_is_named(space: spaces.Space, value: Any, words: str) -> None:
    """At the start, and as a fault of the simulator where it comes later."""
    with pytest.raises(UserError, match=f"'Odd' does not keep to its observation space: .*{words}"):
        GymnasiumSim([Odd(space, observation=value)])
    sim = GymnasiumSim([Odd(space, late=2, observation=value)])
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    sim.step([0], np.zeros((1, 1)), out)
    with pytest.raises(WrongShapeError, match=f"A step of 'Odd' is not what its spaces .*{words}"):
        sim.step([0], np.zeros((1, 1)), out)


@pytest.mark.parametrize(
    ("part", "value"), [("reward", None), ("reward", np.zeros(2)), ("terminated", "False"), ("info", {"success": "no"}), ("info", [])]
)
def test_answers_that_are_no_numbers_are_named(part: str, value: Any) -> None:
    with pytest.raises(UserError, match=r"`step` of 'Odd' must return a number .* as |`step` must return \(observation"):
        GymnasiumSim([Odd(**{part: value})])


def test_an_info_that_is_none_later_is_named() -> None:
    sim = GymnasiumSim([Odd(late=2, info=None)])
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    sim.step([0], np.zeros((1, 1)), out)
    with pytest.raises(WrongShapeError, match=r"A step of 'Odd' is not what .* 'NoneType' object has no attribute 'get'"):
        sim.step([0], np.zeros((1, 1)), out)


@pytest.mark.parametrize("limit", [2, 3])
def test_an_answer_that_is_no_tuple_is_named_at_the_step_limit_too(limit: int) -> None:
    class Silent(Odd):
        def step(self, action: np.ndarray) -> Any:
            answer = super().step(action)
            return answer if self.t < 2 else None

    sim = GymnasiumSim([gymnasium.wrappers.TimeLimit(Silent(), limit)])
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    sim.step([0], np.zeros((1, 1)), out)
    with pytest.raises(WrongShapeError, match=r"A step of 'Silent' is not what its spaces .*NoneType"):
        sim.step([0], np.zeros((1, 1)), out)


def test_frames_that_are_no_pictures_are_refused() -> None:
    for frame, shown in ((None, "None"), (np.zeros((4, 4)), r"\(4, 4\)"), ([np.zeros((4, 4, 3))], r"\(1, 4, 4, 3\)")):
        with pytest.raises(UserError, match=rf"`render` of 'Odd' must return an array \[H, W, 3\] .* got {shown}"):
            GymnasiumSim([Odd(frame=frame)]).render(0)
    assert GymnasiumSim([Odd(frame=np.ones((4, 4, 3)))]).render(0).dtype == np.uint8


def test_what_only_looks_like_an_environment_is_refused() -> None:
    class Agents(gymnasium.Env):  # as PettingZoo's: a space for each agent
        def observation_space(self, agent: str) -> Any: ...  # type: ignore[override]

    with pytest.raises(UserError, match=r"must return a gymnasium\.Env, got object"):
        adapt(object, 1, None, {})
    with pytest.raises(UserError, match=r"Agents\.observation_space must be a gymnasium\.Space, got <bound method"):
        GymnasiumSim([Agents()])

    class Seedless(Odd):
        def reset(self) -> Any: ...  # type: ignore[override]

    with pytest.raises(UserError, match="`reset` of 'Seedless' must take seed and options"):
        GymnasiumSim([Seedless()])


def test_what_is_no_simulator_is_refused() -> None:
    def sized(size: int) -> gymnasium.Env:
        return gymnasium.make("CartPole-v1", max_episode_steps=size)

    for factory, message in ((lambda num_envs: {}, "got dict"), (sized, r"Simulator '.*sized' needs 'size': set sim\.kwargs\.size=VALUE")):
        with pytest.raises(UserError, match=message):
            adapt(factory, 2, None, {})


def test_factory_from_a_target() -> None:
    sim = SimFactory("embodied_rl.sim.robots.gymnasium:make", task="CartPole-v1").make(2)
    assert sim.spec.task == "CartPole-v1"
    assert sim.spec.action.num_actions == 2
    sim = SimFactory("gymnasium.envs.classic_control.pendulum:PendulumEnv").make(2)
    assert sim.spec.task == "PendulumEnv"
    assert sim.spec.max_episode_steps is None


def test_environments_that_differ_are_refused() -> None:
    """One slab holds them all; other bounds of observations are no other observations."""
    plain = [gymnasium.make("CartPole-v1") for _ in range(2)]
    longer = gymnasium.wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), 2)
    with pytest.raises(UserError, match=r"(?s)must have the same observations: environment 0 has Box\(.*\(4,\).*, 2 has .*\(2, 4\)"):
        GymnasiumSim([*plain, longer])
    slower = gymnasium.wrappers.RescaleAction(gymnasium.make("Pendulum-v1"), -1.0, 1.0)
    with pytest.raises(UserError, match=r"must have the same actions: environment 0 has Box\(-2.0, 2.0"):
        GymnasiumSim([gymnasium.make("Pendulum-v1"), slower])
    bounded = gymnasium.wrappers.RescaleObservation(gymnasium.make("Pendulum-v1"), -1.0, 1.0)
    assert GymnasiumSim([gymnasium.make("Pendulum-v1"), bounded]).spec.observation["state"].shape == (3,)
