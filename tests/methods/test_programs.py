"""An agent program is trained: real processes, real HTTP, a real (tiny) model.

What is trained is held against what was captured of a program written with the ordinary openai client; other tests are of what happens
around programs, and run the same game without that package (`plain_agent`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("openai") is None:
    pytest.skip("openai is not installed", allow_module_level=True)

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.commands.replay import replay
from embodied_rl.compose import load_train_config
from embodied_rl.config import TrainConfig
from embodied_rl.episodes.reader import open_recording
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.evaluate import evaluate_checkpoint
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.methods.building import PROGRAM_FAULTS
from embodied_rl.rollout.programs import Played
from embodied_rl.serving.agents.sessions import CapturedSession
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.neighbours.overlay import overlay
from tests.short_run import last_of

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).resolve().parent.parent.parent
AGENT = ROOT / "examples" / "agent_program"
ONCE = ["sim.kwargs.function=null", f"sim.kwargs.command=['{{python}}','{AGENT / 'agent.py'}','{{task}}']", "sim.kwargs.reward=http"]
STAYS = [f"sim.kwargs.function='{AGENT / 'agent.py'}:play'"]
PLAIN = Path(__file__).with_name("plain_agent.py")
PLAIN_ONCE = [word.replace(str(AGENT / "agent.py"), str(PLAIN)) for word in ONCE]
PLAIN_STAYS = ["sim.kwargs.function=null", f"sim.kwargs.command=['{{python}}','{PLAIN}']", "sim.kwargs.mode=serve"]
SMALL = [
    "experiment=agent_program",
    "logger=quiet",
    f"sim.kwargs.tasks={AGENT / 'tasks.jsonl'}",
    "policy.tiny={hidden_size: 32, num_layers: 1, num_heads: 1, num_key_value_heads: 1, intermediate_size: 32, max_context: 256}",
    "algorithm.groups.groups_per_step=2",
    "algorithm.groups.group_size=2",
    "sim.num_slots=3",
]


def small(run_dir: Path, *more: str, program: list[str] = PLAIN_ONCE) -> TrainConfig:
    return load_train_config([*SMALL, *program, f"run_dir={run_dir}", *more])


def an_agent_of_others() -> list[str]:
    """An agent of OpenAI's Agents SDK, unchanged; the package lies beside the environment, and the program sees it there."""
    folder = overlay("openai-agents==0.24.0", "griffelib==2.4.1", "websockets==16.1.1")
    return [
        f"sim.kwargs.function='{AGENT / 'painter.py'}:play'",
        f"sim.kwargs.env={{PYTHONPATH: '{folder}:{ROOT}'}}",
        f"sim.kwargs.readable=['{folder}']",
        "agent.max_new_tokens=100",
    ]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda: ONCE, id="once"),
        pytest.param(lambda: STAYS, id="stays"),
        pytest.param(an_agent_of_others, id="openai-agents", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_what_is_trained_is_what_was_captured(tmp_path: Path, program: Callable[[], list[str]]) -> None:
    config = small(tmp_path, program=program())
    with Trainer(config, tmp_path, command="test") as trainer:
        method: Any = trainer.method
        seen: dict[Any, Played] = {}
        wait = method.collector.runner.wait

        def remembered(timeout_s: float) -> list[Played]:
            found: list[Played] = wait(timeout_s)
            seen.update({played.tag: played for played in found})
            return found

        method.collector.runner.wait = remembered
        trainer.engine.publish(version=0)
        trainer.method.restart(0)
        experience = method.collect(0)
        prepared = method.prepare(experience)
        before = {name: tensor.clone() for name, tensor in trainer.policy.named_weights()}
        method.update(prepared, iteration=0, steps=0)
        changed = [name for name, tensor in trainer.policy.named_weights() if not bool((tensor == before[name]).all())]
    sessions = {played.outcome.session: played.outcome for played in seen.values() if isinstance(played.outcome, CapturedSession)}
    episodes = [episode for group in experience.data[""][""] for episode in group.episodes]
    assert len(episodes) == 4
    rows = [row for episode in episodes for row in sessions[episode.metadata["session"]].trajectories()]
    assert [sequence.token_ids.tolist() for sequence in prepared[""][""].rows.sequences] == [row.token_ids.tolist() for row in rows]
    for number, row in enumerate(rows):
        width = len(row.mask)
        assert prepared[""][""].rows.mask[number, :width].tolist() == row.mask.tolist()
        np.testing.assert_array_equal(prepared[""][""].rows.behaviour_log_prob[number, :width].numpy(), row.log_prob)
    # The proxy's numbers are those of the policy that is trained, by teacher forcing over the joined turns.
    with Trainer(config, tmp_path / "again", command="test") as fresh:
        evaluated = fresh.policy.evaluate(prepared[""][""].rows.sequences)
    for number, row in enumerate(rows):
        np.testing.assert_allclose(
            evaluated.log_prob[number].detach().numpy()[: len(row.mask)][row.mask], row.log_prob[row.mask], atol=1e-4
        )
    rewarded = [{episode.episode_return for episode in group.episodes} for group in experience.data[""][""]]
    assert set().union(*rewarded) <= {0.0, 1.0}
    assert changed or all(len(of_group) == 1 for of_group in rewarded), "rewards differed within a group, and nothing was learned"


def test_a_run_its_checkpoint_and_its_page(tmp_path: Path) -> None:
    scored = "hybrid.reward_worker={target: tests.roles.scores:short_is_good, combine: replace}"
    before = set(threading.enumerate())
    run = train(small(tmp_path / "run", "total_steps=1", "evaluation.num_episodes=3", scored))
    results = json.loads((run / "results.json").read_text())
    assert results["num_episodes"] == 3
    assert "say" in (run / "dialogues.html").read_text()
    figures = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert figures[0]["groups/consumed"] == 2
    assert 1 <= figures[0]["agent/turns_per_program"] <= 2
    assert figures[0]["reward_worker/scored"] == 4.0
    assert figures[0]["reward_worker/score"] == pytest.approx(-0.1 * figures[0]["agent/turns_per_program"])
    checkpoint = load_checkpoint(run)
    damaged = dataclasses.replace(checkpoint, state={**checkpoint.state, "algorithm": {}})
    (tmp_path / "again").mkdir()
    with pytest.raises(IncompatibleCheckpointError, match="cannot be resumed from"):
        Trainer(small(tmp_path / "again"), tmp_path / "again", command="test", checkpoint=damaged)
    for thread in set(threading.enumerate()) - before:  # of the proxies, and the reward workers
        thread.join(60)
        assert not thread.is_alive(), thread
    again = evaluate_checkpoint(checkpoint, 3)
    assert [episode.seed for episode in again.episodes] == [2**30, 2**30 + 1, 2**30 + 2]
    assert float(np.mean([episode.success_once for episode in again.episodes])) == results["success"]
    with pytest.raises(UserError, match=r"needs a language model behind the proxy|needs a list of actions"):
        evaluate_checkpoint(checkpoint, 1, policy="random")


ITS_OWN = ", policy: {name: language, tiny: {hidden_size: 16, num_heads: 1, num_key_value_heads: 1, intermediate_size: 16}}"


@pytest.mark.parametrize(
    ("placement", "own"),
    [("hybrid=local", ""), pytest.param("hybrid=disaggregated", "", marks=pytest.mark.slow), ("hybrid=disaggregated", ITS_OWN)],
)
def test_programs_are_one_of_several_domains_here_and_elsewhere(tmp_path: Path, placement: str, own: str) -> None:
    """Beside a game that the agent itself plays: one model answers both, and learns from both; or programs have their own."""
    kwargs = f"tasks: '{AGENT / 'tasks.jsonl'}', command: ['{{python}}', '{PLAIN}'], mode: serve, reward: return, texts: [say one colour]"
    programs = f"{{name: agent_program, target: 'embodied_rl.sim.text.program:AgentProgram', kwargs: {{{kwargs}}}, num_slots: 2}}"
    lake = "{name: frozenlake, target: 'embodied_rl.sim.text.frozenlake:make', kwargs: {hints: true}, num_slots: 4, num_workers: 1}"
    words = [word for word in SMALL if not word.startswith(("experiment", "sim.", "algorithm.groups.groups_per_step"))]
    words += ["policy=language", "algorithm=grpo", "generation=tokens_torch", "video.enabled=no", "algorithm.groups.filters=[]", placement]
    words += [f"domains.code={{sim: {programs}{own}}}", f"domains.lake={{sim: {lake}, agent: {{actions: [up, down, left, right]}}}}"]
    words += ["algorithm.groups.groups_per_step=4", "total_steps=20", "evaluation.num_episodes=2", "agent.max_new_tokens=4"]
    words += ["algorithm.minibatch_size=16", "hybrid.device=cpu", "hybrid.num_threads=1", f"run_dir={tmp_path / 'run'}"]
    folder = train(load_train_config(words))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["domains/code/groups_consumed"] == rows[-1]["domains/lake/groups_consumed"] == 2 * len(rows)
    assert rows[-1]["domains/code/agent/turns_per_program"] >= 1
    assert rows[-1]["train/language/tokens"] > 0
    assert ("train/code/tokens" in rows[-1]) == bool(own)
    assert rows[-1].get("train/code/log_prob_difference", 0.0) == 0.0, "other weights answered"
    results = json.loads((folder / "results.json").read_text())
    assert {name: own["num_episodes"] for name, own in results["tasks"].items()} == {"code": 2, "lake": 2}
    assert (folder / "dialogues-code.html").is_file()


def test_failed_programs_are_written_down(tmp_path: Path) -> None:
    """One that fails has no reward in training, and counts as an episode without success in evaluation."""
    crashing = tmp_path / "crashing.py"
    crashing.write_text(
        "import os, runpy, sys\n"
        "if int(os.environ['EMBODIED_RL_SEED']) >= 2**30: raise SystemError('not today')\n"
        f"runpy.run_path({str(PLAIN)!r}, run_name='__main__')\n"
    )
    more = [f"sim.kwargs.command=['{{python}}','{crashing}','{{task}}']", "total_steps=1", "evaluation.num_episodes=2"]
    more += [f"sim.kwargs.readable=['{PLAIN.parent}']", f"sim.kwargs.writable=['{tmp_path}']"]
    run = train(small(tmp_path / "run", *more))
    results = json.loads((run / "results.json").read_text())
    assert (results["num_episodes"], results["success"], results["return_mean"]) == (2, 0.0, 0.0)
    assert not (run / PROGRAM_FAULTS).exists(), "no program of the training failed"
    crashing.write_text(
        "import os, runpy, sys\n"
        f"marker = {str(tmp_path / 'crashed')!r}\n"
        "try:\n    os.close(os.open(marker, os.O_CREAT | os.O_EXCL)); sys.exit(9)\nexcept FileExistsError:\n    pass\n"
        f"runpy.run_path({str(PLAIN)!r}, run_name='__main__')\n"
    )
    run = train(small(tmp_path / "second", *more))
    (record,) = [json.loads(line) for line in (run / PROGRAM_FAULTS).read_text().splitlines()]
    assert (record["kind"], record["exit_status"], record["iteration"]) == ("crashed", 9, 0)
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["agent/failed_crashed"] == 1


BY_SCHEMA = """
import json, os

COLOUR = {"enum": ["red", "green", "blue"]}
ANSWER = {"type": "object", "properties": {"colour": COLOUR}, "required": ["colour"], "additionalProperties": False}


def play(client, task):
    asked = [{"role": "user", "content": "say one colour"}]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=asked, response_format=form)
    if answer.choices[0].finish_reason != "stop":
        return 0.0
    return float(json.loads(answer.choices[0].message.content)["colour"] == task["colour"])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_by_a_schema_from_hosts_that_are_lent(tmp_path: Path) -> None:
    """Structures reach token backends in other processes, and the trainer finds the log-probabilities that these found."""
    (tmp_path / "structured.py").write_text(BY_SCHEMA)
    program = [f"sim.kwargs.function='{tmp_path / 'structured.py'}:play'", "hybrid.placement=multiplexed", "hybrid.device=cpu"]
    more = ["algorithm.groups.max_staleness=1", "agent.max_new_tokens=48", "total_steps=4", "evaluation.num_episodes=2"]
    run = train(small(tmp_path / "run", *more, "hybrid.num_threads=1", program=program))
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["train/entropy"] < 1.5
    assert first["train/log_prob_difference"] < 1e-4
    assert first["agent/failed"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("said", ["freely", "by a schema"])
def test_success_rises(said: str, tmp_path: Path) -> None:
    """GRPO on the answers of an unchanged program: about one in eight is right at the beginning, nearly all are at the end.

    By a schema one in three is right at first, and what is trained is the choice: its braces and names are nobody's choice, so that the
    entropy is far below that of some two hundred tokens, and updates stay small.
    """
    stays = STAYS
    if said == "by a schema":
        (tmp_path / "structured.py").write_text(BY_SCHEMA)
        stays = [f"sim.kwargs.function='{tmp_path / 'structured.py'}:play'", "agent.max_new_tokens=48"]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"colour": "green"}\n')
    command = [
        *(word for word in SMALL if not word.startswith(("policy.tiny", "algorithm.groups", "sim.kwargs.tasks", "sim.num_slots"))),
        *stays,
        f"sim.kwargs.tasks={tasks}",
        "sim.kwargs.texts=[say one colour red green blue]",
        "algorithm.groups.group_size=12",
        "algorithm.groups.groups_per_step=2",
        "algorithm.learning_rate=5e-3",
        "evaluation.num_episodes=4",
        "total_steps=300",
        "logger=default",
        f"run_dir={tmp_path / 'run'}",
    ]
    subprocess.run([sys.executable, "-m", "embodied_rl.train", *last_of(command)], cwd=ROOT, check=True, timeout=500, capture_output=True)
    figures = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    returns = [line["episode/success"] for line in figures if "episode/success" in line]
    assert returns[0] <= (0.35 if said == "freely" else 0.65)
    assert (figures[0]["train/entropy"] < 1.5) == (said == "by a schema")
    assert max(line["train/approx_kl"] for line in figures) < 0.5
    assert json.loads((tmp_path / "run" / "results.json").read_text())["success"] >= 0.75


def painter(said: str) -> str:
    """A scripted player: it says the colour that it is to say."""
    return said.removeprefix("say ")


@pytest.mark.parametrize("program", [pytest.param(ONCE, id="once", marks=pytest.mark.slow), pytest.param(PLAIN_STAYS, id="stays")])
def test_a_scripted_player_answers_a_program_and_is_cloned(tmp_path: Path, program: list[str]) -> None:
    options = (
        "player: 'tests.methods.test_programs:painter'",
        "episodes: 12",
        "num_epochs: 20",
        "minibatch_rows: 4",
        "learning_rate: 0.01",
    )
    start = f"+algorithm.warm_start={{{', '.join(options)}, measured_episodes: 6}}"
    run_dir = train(small(tmp_path, start, "total_steps=4", "evaluation.num_episodes=6", program=program))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told = {name: value for line in lines for name, value in line.items() if name.startswith("warm_start/")}
    assert told["warm_start/episodes"] == 12
    assert told["warm_start/turns"] == 12, "each was right at once"
    assert told["warm_start/success_after"] > told["warm_start/success_before"]
    assert told["warm_start/success_after"] == 1.0


def mute(said: str) -> str:
    """A player that names no colour."""
    return "say"


def test_a_player_that_a_program_does_not_understand_is_one_line(tmp_path: Path) -> None:
    start = "{player: 'tests.methods.test_programs:mute', episodes: 2, measured_episodes: 1}"
    with pytest.raises(UserError, match=r"test_programs:mute succeeded in 0 of 8 episodes"):
        train(small(tmp_path, f"+algorithm.warm_start={start}", program=PLAIN_STAYS))


def test_dialogues_of_programs_are_recorded(tmp_path: Path) -> None:
    """Every turn of every episode that was learned from, with what the program gave for it; the run is the same."""
    words = ("total_steps=12", "evaluation.num_episodes=1")
    runs = [("a", ["record.share=1"]), ("b", [])]
    recorded, plain = (train(small(tmp_path / name, *words, *more, program=PLAIN_STAYS)) for name, more in runs)
    losses = [[line["train/loss"] for line in read_metrics(folder)] for folder in (recorded, plain)]
    # Which answers are sampled together, and with it the last bits, is a matter of time.
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    recording = open_recording(recorded / "episodes")
    assert sum(recording.lengths) >= read_metrics(recorded)[-1]["step"]
    for episode in recording:
        seen = episode.observation["text"].tolist()
        assert "say" in seen[0]
        assert seen[-1] == f"reward {episode.episode_return:g}"
        assert episode.success.tolist() == [False] * (episode.num_steps - 1) + [episode.episode_return == 1.0]
        assert episode.action.tolist() == [answer.strip() for answer in episode.metadata["answers"]]
        assert episode.log_prob is not None
        assert (episode.log_prob < 0).all()
    with pytest.raises(UserError, match="an agent program"):
        replay(recording)
