"""Parts of the user's own: examples/own_parts as it is used, each against an independent answer, and mistakes in one line."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.algorithms.advantage_table import advantage_info
from embodied_rl.algorithms.aggregation import TOKEN_MEAN
from embodied_rl.algorithms.loss_table import loss_info
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.commands import evaluate
from embodied_rl.config import AlgorithmConfig, CustomPolicyConfig, GroupsConfig, LoggerConfig, PolicyConfig
from embodied_rl.config.compose import load_train_config
from embodied_rl.config.rules import resolve
from embodied_rl.errors import UserError
from embodied_rl.loggers import check_loggers
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.base import ActionOutput, Evaluation, Policy, TensorObservation
from embodied_rl.policies.build import build_policy, custom_class
from embodied_rl.registry import Registry, installed_targets
from embodied_rl.train import train
from embodied_rl.trust import named_code, registered_code
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
from tests.short_run import QUICK, one_line_error, train_shortly

pytestmark = pytest.mark.usefixtures("forked")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "own_parts"
GRPO = ("sim=cartpole", "algorithm=grpo", "algorithm.groups.group_size=3", "algorithm.groups.groups_per_step=2", "policy.hidden_sizes=[8]")
SHORT = (*GRPO, "total_steps=100")


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's folder can be imported from, as the folder can where a command is typed."""
    monkeypatch.syspath_prepend(EXAMPLE)
    yield
    installed_targets.cache_clear()


def policy_of(run: Path) -> dict[str, Tensor]:
    return load_checkpoint(run).policy


# ---- losses and advantages ------------------------------------------------------------------------------------------


def test_the_example_loss_by_hand() -> None:
    log_prob = torch.tensor([0.1, -0.2, 0.0]).log1p().requires_grad_()
    loss, metrics = loss_info("my_parts.losses:spo").load()(
        log_prob=log_prob,
        old_log_prob=torch.zeros(3),
        advantage=torch.tensor([1.0, -2.0, 5.0]),
        mask=torch.tensor([True, True, False]),
        denominator=None,
        aggregation=TOKEN_MEAN,
        epsilon=0.15,
    )
    # Ratios 1.1 and 0.8: -1.1 + 0.01 / 0.3 and 1.6 + 2 · 0.04 / 0.3, over two entries.
    assert loss.item() == pytest.approx((-1.1 + 0.01 / 0.3 + 1.6 + 0.08 / 0.3) / 2)
    assert metrics["outside_fraction"].item() == pytest.approx(0.5)
    assert metrics["policy_loss"].item() == loss.item()
    loss.backward()
    # d/d(log pi) = r (-A + |A| (r - 1) / epsilon), over two.
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([1.1 * (-1 + 2 / 3) / 2, 0.8 * (2 - 8 / 3) / 2, 0.0], abs=1e-6)


def test_the_example_advantage_by_hand() -> None:
    found = advantage_info("my_parts.advantages:median").load()(
        score=torch.tensor([1.0, 7.0, 3.0, 5.0, 0.0]), group=torch.tensor([4, 9, 4, 4, 9]), scale=2.0
    )
    assert found.tolist() == [-4.0, 7.0, 0.0, 4.0, -7.0]


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["algorithm.loss=my_parts.losses:spo"], "algorithm.loss_options"),
        (["algorithm=grpo", "algorithm.advantage=rloo"], "algorithm.advantage_options"),
        (["policy=custom", "policy.target=my_parts.policies:Own"], "policy.options"),
        ([], "sim.kwargs"),
    ],
)
def test_arguments_are_given_one_by_one_or_as_a_mapping(words: list[str], place: str) -> None:
    single, whole = (
        load_train_config(["sim=cartpole", "run_dir=run", *words, f"{place}{word}"]) for word in (".epsilon=0.3", "={epsilon: 0.3}")
    )
    assert whole == single
    assert "'epsilon': 0.3" in str(whole.to_dict())


def test_own_functions_train_and_are_saved_by_name(tmp_path: Path) -> None:
    words = (
        *("algorithm.loss=my_parts.losses:spo", "algorithm.loss_options.epsilon=0.3"),
        *("algorithm.advantage=my_parts.advantages:median", "algorithm.advantage_options.scale=0.5"),
    )
    run = train_shortly(tmp_path / "run", *SHORT, *words)
    saved = load_checkpoint(run).config
    assert (saved.algorithm.loss, saved.algorithm.loss_options) == ("my_parts.losses:spo", {"epsilon": 0.3})
    assert saved.algorithm.advantage == "my_parts.advantages:median"
    # Another user's checkpoint that names them is asked about before they run.
    assert {code.name for code in named_code(saved.to_dict())} >= {"my_parts.losses:spo", "my_parts.advantages:median"}
    assert any("train/outside_fraction" in row for row in read_metrics(run / "metrics.jsonl"))
    # The command line says nothing of them now: what is continued stands in the checkpoint.
    more = ["resume=auto", "total_steps=200", f"run_dir={run}"]
    train(load_train_config(["sim=cartpole", *QUICK, *more]), overrides=more)
    assert load_checkpoint(run).step >= 200
    assert load_checkpoint(run).config.algorithm.loss == "my_parts.losses:spo"


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param((), id="here"),
        pytest.param(("hybrid=disaggregated", "hybrid.device=cpu"), id="disaggregated", marks=pytest.mark.slow),
        pytest.param(("hybrid=fsdp2", "hybrid.device=cpu"), id="ranks", marks=pytest.mark.slow),
        pytest.param(("hybrid=ray", "hybrid.device=cpu"), id="ray", marks=pytest.mark.slow),
    ],
)
def test_a_name_and_a_target_are_the_same_run(tmp_path: Path, placement: tuple[str, ...]) -> None:
    """Our own functions by their targets go the whole way of a user's, and must come out bit for bit."""
    by_target = ("algorithm.loss=embodied_rl.algorithms.losses:ppo_clip_loss", "algorithm.advantage=embodied_rl.algorithms.grouped:rloo")
    named = train_shortly(tmp_path / "named", *SHORT, *placement, "algorithm.loss=ppo_clip", "algorithm.advantage=rloo")
    own = train_shortly(tmp_path / "own", *SHORT, *placement, *by_target)
    first, second = policy_of(named), policy_of(own)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param((), id="here"),
        pytest.param(("hybrid=fsdp2", "hybrid.device=cpu"), id="ranks", marks=pytest.mark.slow),
    ],
)
def test_a_loss_on_fixed_rollouts(tmp_path: Path, placement: tuple[str, ...]) -> None:
    """PPO's loss by its target is PPO bit for bit, in its figures too; a loss of another form learns, and says what it gave."""
    words = ("sim=cartpole", "policy.activation=relu", "total_steps=512", *placement)
    runs = [
        train_shortly(tmp_path / name, *words, f"algorithm.loss={loss}")
        for name, loss in (("named", "ppo_clip"), ("own", "embodied_rl.algorithms.losses:ppo_clip_loss"))
    ]
    named, own = (policy_of(run) for run in runs)
    assert all(torch.equal(named[name], own[name]) for name in named)
    figures = [
        [{name: value for name, value in row.items() if name.startswith("train/")} for row in read_metrics(run / "metrics.jsonl")]
        for run in runs
    ]
    assert figures[0] == figures[1]


def test_the_example_loss_on_fixed_rollouts(tmp_path: Path) -> None:
    run = train_shortly(tmp_path / "run", "sim=cartpole", "algorithm.loss=my_parts.losses:spo", "algorithm.num_epochs=2")
    (row,) = (row for row in read_metrics(run / "metrics.jsonl") if "train/outside_fraction" in row)
    assert row["train/entropy"] == pytest.approx(math.log(2), abs=0.01), "two choices, hardly trained"
    assert "train/clip_fraction" not in row
    assert row["train/epochs_done"] == 2


@pytest.mark.parametrize("groups", [(), ("algorithm=ppo_episodes", "algorithm.groups.groups_per_step=4")], ids=["rollouts", "episodes"])
def test_an_advantage_with_a_critic(tmp_path: Path, groups: tuple[str, ...]) -> None:
    words = ("sim=cartpole", *groups, "total_steps=128", "algorithm.rollout_steps=16")
    named = policy_of(train_shortly(tmp_path / "named", *words, "algorithm.advantage=gae"))
    own = policy_of(train_shortly(tmp_path / "own", *words, "algorithm.advantage=embodied_rl.algorithms.advantages:gae"))
    assert all(torch.equal(named[name], own[name]) for name in named)


def no_mask(*, log_prob: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return log_prob.sum(), {}


def no_log_prob(*, advantage: Tensor, mask: Tensor, denominator: float, aggregation: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return advantage.sum(), {}


def swallows(*, log_prob: Tensor, mask: Tensor, denominator: float, aggregation: Any, **rest: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return log_prob.sum(), {}


def detached(*, log_prob: Tensor, mask: Tensor, denominator: float, aggregation: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return log_prob.detach().sum(), {}


def worded(*, log_prob: Tensor, mask: Tensor, denominator: float, aggregation: Any) -> tuple[Tensor, dict[str, Any]]:
    return log_prob.sum(), {"number": 1.0, "words": "many"}


def bare(*, log_prob: Tensor, mask: Tensor, denominator: float, aggregation: Any) -> Tensor:
    return log_prob.sum()


def of_success(
    *, log_prob: Tensor, positive: Tensor, mask: Tensor, denominator: float, aggregation: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    return -(log_prob * positive).sum(), {}


def of_both(*, score: Tensor, value: Tensor) -> Tensor:
    return score


def of_nothing(*, strength: float) -> Tensor:
    return torch.zeros(1)


def of_one_number(*, score: Tensor) -> Tensor:
    return score.mean()


HERE = "tests.test_own_parts"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss": "my_parts.losses:spoo"}, "has no 'spoo'. Did you mean 'spo'"),
        ({"loss": "my_part.losses:spo"}, "Is its package installed"),
        (
            {"loss": "my_parts.losses:spo", "loss_options": {"epsilo": 0.1}},
            "not an option of 'my_parts.losses:spo'. Did you mean 'epsilon'",
        ),
        ({"loss": "my_parts.losses:spo", "loss_options": {"epsilon": "a"}}, "algorithm.loss_options.epsilon must be a number"),
        ({"loss": "my_parts.losses:spo", "loss_options": {"epsilon": 7.0}}, "must be between 0.001 and 1"),
        ({"loss": f"{HERE}:of_success", "groups": None, "advantage": "gae"}, r"needs whole episodes \(it reads positive\)"),
        ({"loss": "gspo", "groups": None, "advantage": "gae"}, r"\(its ratio is that of a sequence\)"),
        ({"loss": "policy_gradient", "groups": None, "advantage": "gae"}, r"has no ratio.* set algorithm\.num_epochs=1"),
        ({"loss": f"{HERE}:no_mask"}, "does not take 'mask'"),
        ({"loss": f"{HERE}:no_log_prob"}, "does not take 'log_prob'"),
        ({"loss": f"{HERE}:swallows"}, "takes 'rest' without a name"),
        ({"loss": f"{HERE}:HERE"}, "must be a function, got str"),
        ({"advantage": f"{HERE}:of_both"}, r"takes value \[T, N\] and score \[B\]"),
        ({"advantage": f"{HERE}:of_nothing"}, "must take at least one array"),
        ({"advantage": "my_parts.advantages:median", "groups": GroupsConfig(group_size=1)}, "compares the episodes of a group"),
        ({"advantage": "my_parts.advantages:median", "groups": None}, "needs whole episodes"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(changes: dict[str, Any], reason: str) -> None:
    algorithm = AlgorithmConfig(**{"advantage": "grpo", "groups": GroupsConfig(), **changes})
    config = dataclasses.replace(load_train_config(["sim=cartpole"]), algorithm=algorithm)
    with pytest.raises(UserError, match=reason) as caught:
        resolve(config)
    assert len(str(caught.value)) <= 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("detached", "has no gradient"), ("bare", "must return (loss, metrics)"), ("worded", "must be numbers, and 'words' is none")],
)
def test_what_a_loss_returns_is_checked(name: str, reason: str) -> None:
    loss = loss_info(f"{HERE}:{name}").load()
    with pytest.raises(UserError) as caught:
        loss(log_prob=torch.zeros(2, requires_grad=True), mask=None, denominator=None, aggregation=TOKEN_MEAN)
    assert reason in str(caught.value)


def test_what_an_advantage_returns_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must return one advantage for each row \[6\] or entry \[6, \d+\], got \[\]"):
        train_shortly(tmp_path / "run", *SHORT, f"algorithm.advantage={HERE}:of_one_number")


# ---- policies -------------------------------------------------------------------------------------------------------

FOURIER = ("sim=pendulum", "policy=custom", "policy.target=my_parts.policies:FourierPolicy", "policy.options.num_features=8")


class SmallNetworks(ActorCritic):
    """`policy=mlp` as a user's own class."""

    def __init__(self, spec: SimSpec, *, hidden_sizes: tuple[int, ...] = (256, 256)) -> None:
        super().__init__(PolicyConfig(hidden_sizes=tuple(hidden_sizes), activation="relu", normalize_observation=True), spec)


class Unmade(Policy):
    """Inherits torch's constructor, which takes no spec."""


class Chunked(SmallNetworks):
    def __init__(self, spec: SimSpec, **options: Any) -> None:
        super().__init__(spec, **options)

    @property
    def chunk_size(self) -> int:
        return 3


class Dreamer(SmallNetworks):
    @property
    def observation_keys(self) -> tuple[str, ...]:
        return ("sate",)


class ValuesOfOneColumn(SmallNetworks):
    def value(self, observation: TensorObservation) -> Tensor:
        return super().value(observation)[:, None]


class BareTensor(SmallNetworks):
    def act(self, observation: TensorObservation, noise: Tensor | None) -> ActionOutput:
        return super().act(observation, noise).action  # type: ignore[return-value]


class FlatActions(SmallNetworks):
    def act(self, observation: TensorObservation, noise: Tensor | None) -> ActionOutput:
        acted = super().act(observation, noise)
        return ActionOutput(acted.action[:, 0], acted.log_prob)


class HalfChoices(SmallNetworks):
    def act(self, observation: TensorObservation, noise: Tensor | None) -> ActionOutput:
        acted = super().act(observation, noise)
        return ActionOutput(acted.action + 0.5, acted.log_prob)

    def evaluate(self, observation: TensorObservation, action: Tensor) -> Evaluation:
        return super().evaluate(observation, action.long())


class OtherOdds(SmallNetworks):
    def evaluate(self, observation: TensorObservation, action: Tensor) -> Evaluation:
        found = super().evaluate(observation, action)
        return Evaluation(2 * found.log_prob, found.entropy, found.value)


def train_custom(run_dir: Path, *words: str, without: tuple[str, ...] = ("policy.hidden_sizes",)) -> Path:
    changes = [word for word in (*QUICK, *words, f"run_dir={run_dir}") if not word.startswith(without)]
    return train(load_train_config(changes), overrides=changes)


def test_the_example_policy_by_hand() -> None:
    policy_class = custom_class(CustomPolicyConfig(target="my_parts.policies:FourierPolicy", options={"num_features": 2}))
    spec = SimSpec("t", {"state": TensorSpec((1,))}, ActionSpec.continuous([-1.0], [1.0]))
    policy: Any = policy_class(spec, num_features=2)  # type: ignore[call-arg]
    with torch.no_grad():
        policy.frequency.copy_(torch.tensor([[1.0, 0.0]]))
        policy.phase.copy_(torch.tensor([0.0, math.pi]))
        for layer, weight, bias in ((policy.actor, [[2.0, 1.0]], 0.5), (policy.critic, [[0.0, 3.0]], 0.25)):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.fill_(bias)
        policy.head.log_std.fill_(0.0)
    # Features cos(x) and cos(π) = -1: the mean is 2 cos(x) - 1 + 0.5, the value -3 + 0.25.
    seen, action = {"state": torch.tensor([[math.pi / 3]])}, torch.tensor([[1.5]])
    found = policy.evaluate(seen, action)
    assert policy.act(seen, None).action.item() == pytest.approx(0.5)
    assert found.log_prob.item() == pytest.approx(-0.5 * (1.5 - 0.5) ** 2 - 0.5 * math.log(2 * math.pi))
    assert found.value.item() == pytest.approx(-2.75)


def test_an_own_policy_is_trained_and_evaluated_and_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_custom(tmp_path / "run", *FOURIER)
    saved = load_checkpoint(run)
    assert isinstance(saved.config.policy, CustomPolicyConfig)
    assert (saved.config.policy.target, saved.config.policy.options) == ("my_parts.policies:FourierPolicy", {"num_features": 8})
    assert saved.policy["frequency"].shape == (3, 8), "what is not trained is saved too"
    evaluate.main([f"checkpoint={run}", "num_episodes=2"])
    assert "2 held-out seeds" in capsys.readouterr().out
    # On another user's machine the name is asked about before it is imported.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    line = one_line_error(evaluate.main, [f"checkpoint={run}", "num_episodes=2"], capsys)
    assert "policy.target=my_parts.policies:FourierPolicy" in line
    assert load_checkpoint(run, trust=["my_parts.policies:FourierPolicy"]).step == saved.step


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param((), id="here"),
        pytest.param(("hybrid=disaggregated", "hybrid.device=cpu"), id="disaggregated", marks=pytest.mark.slow),
        pytest.param(("hybrid=fsdp2", "hybrid.device=cpu"), id="ranks", marks=pytest.mark.slow),
    ],
)
def test_an_own_policy_is_the_run_of_ours(tmp_path: Path, placement: tuple[str, ...]) -> None:
    """The class of `policy=mlp` by its target goes the whole way of a user's, and must come out bit for bit."""
    words = ("sim=cartpole", "total_steps=512", *placement)
    ours = train_shortly(tmp_path / "ours", *words, "policy.activation=relu", "policy.normalize_observation=true")
    by_target = ("policy=custom", f"policy.target={HERE}:SmallNetworks", "policy.options.hidden_sizes=[16]")
    own = policy_of(train_custom(tmp_path / "own", *words, *by_target))
    assert all(torch.equal(tensor, own[name]) for name, tensor in policy_of(ours).items())


@pytest.mark.slow
def test_an_own_policy_on_ranks_and_cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that stand in no sequence, a head's among them, are gathered for its methods."""
    monkeypatch.chdir(EXAMPLE)  # the command is typed there; other processes start there
    ranks = ("hybrid=fsdp2", "hybrid.device=cpu", "hybrid.num_threads=1")
    one = policy_of(train_custom(tmp_path / "one", *FOURIER, "hybrid.num_threads=1"))
    two = policy_of(train_custom(tmp_path / "two", *FOURIER, *ranks))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-4, msg=name)
    custom = ("sim=key_door", "algorithm=bc", "policy=custom", f"policy.target={HERE}:SmallNetworks", "policy.options.hidden_sizes=[16]")
    unknown = ("policy.hidden_sizes", "algorithm.rollout_steps")
    run = train_custom(tmp_path / "bc", *custom, "algorithm.recorded.expert_episodes=4", "total_steps=20", without=unknown)
    losses = [row["train/imitation_loss"] for row in read_metrics(run / "metrics.jsonl") if "train/imitation_loss" in row]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target": "my_parts.policies:FourierPolic"}, "Did you mean 'FourierPolicy'"),
        ({"target": "fourierr"}, "Policy 'fourierr' is not known"),
        ({"target": "my_parts.losses:spo"}, "must be a subclass of embodied_rl.policies.base.Policy"),
        ({"options": {"num_feature": 3}}, r"policy\.options\.num_feature is not an argument .* Did you mean 'num_features'"),
        ({"options": {"num_features": 0}}, r"policy\.options\.num_features must be between 1 and"),
        ({"options": {"key": "sate"}}, "policy.options.key='sate' is not a vector .* Did you mean 'state'"),
        ({"target": f"{HERE}:Chunked", "options": {"hidden_sizes": [8]}}, "set policy.chunk=3"),
        ({"target": f"{HERE}:Unmade", "options": {}}, r"Unmade' has no constructor: give it `def __init__\(self, spec: SimSpec, …\)`"),
        ({"target": "???"}, r"policy\.target must be given, such as policy\.target=my_package"),
        ({"target": f"{HERE}:ValuesOfOneColumn", "options": {}}, r"`value` returns values of shape \[2, 1\], for 2 .* must be \[2\]"),
        ({"target": f"{HERE}:BareTensor", "options": {}}, r"`act` must return ActionOutput\(action, log_prob\), got Tensor"),
        ({"target": f"{HERE}:FlatActions", "options": {}}, r"`act` returns action of shape \[2\], for 2 .* must be \[2, 1\]"),
        ({"target": f"{HERE}:HalfChoices", "options": {}}, r"`act` returns actions of torch\.float32, and must return int64"),
        ({"target": f"{HERE}:OtherOdds", "options": {}}, "`act` and `evaluate` differ in the log-probabilities of the same action: "),
        ({"target": f"{HERE}:Dreamer", "options": {}}, "reads 'sate', which task 't' does not have. Did you mean 'state'"),
    ],
)
def test_mistakes_with_policies_are_one_line(changes: dict[str, Any], reason: str) -> None:
    spec = SimSpec("t", {"state": TensorSpec((2,))}, ActionSpec.discrete(2))
    with pytest.raises(UserError, match=reason) as caught:
        build_policy(CustomPolicyConfig(**{"target": "my_parts.policies:FourierPolicy", **changes}), spec)
    assert len(str(caught.value)) <= 400


# ---- loggers --------------------------------------------------------------------------------------------------------


def test_an_own_logger_takes_the_metrics(tmp_path: Path) -> None:
    words = ("logger.names=[jsonl,'my_parts.loggers:CsvLogger']", "logger.options.CsvLogger.columns=[train/entropy,train/policy_loss]")
    run = train_shortly(tmp_path / "run", *SHORT, *words)
    lines = (run / "csv.csv").read_text(encoding="utf-8").splitlines()
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "train/entropy" in row]
    assert lines[0] == "step,train/entropy,train/policy_loss"
    told = [(int(step), float(entropy), float(loss)) for step, entropy, loss in (line.split(",") for line in lines[1:]) if entropy]
    assert told == [(row["step"], row["train/entropy"], row["train/policy_loss"]) for row in rows]
    assert told
    assert load_checkpoint(run).config.logger.names == ("jsonl", "my_parts.loggers:CsvLogger")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"names": ("jsonll",)}, r"logger\.names\[0\]='jsonll' is not a choice. Did you mean 'jsonl'"),
        ({"names": ("my_parts.loggers:CsvLoger",)}, "Did you mean 'CsvLogger'"),
        ({"names": ("my_parts.losses:spo",)}, "must be a subclass of embodied_rl.loggers.Logger"),
        ({"names": ("embodied_rl.loggers:Logger",)}, "it must define close and log"),
        ({"names": ("my_parts.loggers:CsvLogger",), "options": {"CsvLogger": {"colums": []}}}, "Did you mean 'columns'"),
        ({"names": ("my_parts.loggers:CsvLogger",), "options": {"CsvLogger": {"columns": 3}}}, "options.CsvLogger.columns must be a list"),
        ({"names": ("my_parts.loggers:CsvLogger",), "options": {"Csv": {}}}, "logger.names does not contain this logger"),
    ],
)
def test_mistakes_with_loggers_are_one_line(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_loggers(LoggerConfig(**changes))


# ---- installed packages ---------------------------------------------------------------------------------------------


def install_entry_points(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's entry points as pip leaves them."""
    import tomllib

    groups = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    info = folder / "my_parts-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 0.1.0\n", encoding="utf-8")
    lines = [line for group, points in groups.items() for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    installed_targets.cache_clear()


def test_installed_parts_have_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="Loss 'spo' is not known"):
        Registry("loss", "losses", {}).target("spo")
    install_entry_points(tmp_path / "site", monkeypatch)
    for module, kind, name, target in (
        ("loss_table", "loss", "spo", "my_parts.losses:spo"),
        ("advantage_table", "advantage", "median", "my_parts.advantages:median"),
    ):
        table = importlib.import_module(f"embodied_rl.algorithms.{module}")
        monkeypatch.setattr(table, "_NAMES", Registry(kind, "losses" if kind == "loss" else "advantages", {}))
        assert getattr(table, f"{kind}_info")(name).target == target
    with pytest.raises(UserError, match=r"Loss 'spoo' is not known\. Did you mean 'spo'"):
        loss_info("spoo")
    assert LoggerConfig(names=("csv",)).names == ("csv",)
    assert ("loss", "my_parts.losses:spo") in registered_code.__wrapped__()
