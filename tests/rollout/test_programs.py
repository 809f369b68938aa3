"""Agent programs as real processes over real HTTP: what becomes an episode, and what becomes a typed fault."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.agents.turns import rows_of
from embodied_rl.config import GroupsConfig, SimConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import BatchNeverFullError, GroupQueue
from embodied_rl.rollout.programs import Played, ProgramCollector, ProgramFault, ProgramFaultKind, ProgramRunner, episode_of_session
from embodied_rl.sandbox import landlock
from embodied_rl.sandbox.box import strongest
from embodied_rl.serving.agents.sessions import CapturedSession, SessionSampling
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.sim.text.program import TARGET, ProgramOptions, TaskBook
from tests.rollout.programs import options, program, running, running_with, says, tokenizer


def play(runner: ProgramRunner, *seeds: int, hangs: Path | None = None) -> list[Played]:
    """The time of all programs is over as soon as there is a file `hangs`."""
    for seed in seeds:
        runner.start(seed, seed, SessionSampling(seed))
    ended: dict[Hashable, Played] = {}
    while runner.num_running:
        if hangs is not None and hangs.exists():
            for one in runner._running.values():
                one.process.deadline = 0.0
        ended |= {played.tag: played for played in runner.wait(60.0 if hangs is None else 0.05)}
    return [ended[seed] for seed in seeds]


def captured(played: Played) -> CapturedSession:
    assert isinstance(played.outcome, CapturedSession), played.outcome
    return played.outcome


def fault(played: Played) -> ProgramFault:
    assert isinstance(played.outcome, ProgramFault), played.outcome
    return played.outcome


def test_several_programs_with_tasks_of_their_own(tmp_path: Path) -> None:
    words = tokenizer()
    (tmp_path / "tasks.jsonl").write_text('{"colour": "red"}\n\n{"colour": "blue"}\n')
    path = program(tmp_path, "said = ask('say ' + task['colour'])\nreward(1.0 if task['colour'] in said else 0.25)\n")
    with running(says(words, "red"), words, options(path, tasks=str(tmp_path / "tasks.jsonl"))) as runner:
        found = play(runner, *range(6))
    assert {played.task["colour"] for played in found} == {"red", "blue"}
    assert [played.reward for played in found] == [1.0 if played.task["colour"] == "red" else 0.25 for played in found]
    for played in found:
        (turn,) = captured(played).turns
        assert turn.sampled_ids.tolist() == [*words.encode("red"), 2]
        assert turn.version.tolist() == [5, 5]
        asked = [{"role": "user", "content": f"say {played.task['colour']}"}]
        assert turn.prompt_ids.tolist() == words.chat(asked).tolist()


FAILING: list[tuple[str, str, str, dict[str, Any], ProgramFaultKind]] = [
    ("exception", "ask('say'); reward(1.0)\nraise KeyError('oops')", "KeyError: 'oops'", {}, ProgramFaultKind.CRASHED),
    ("status", "ask('say'); reward(1.0); sys.exit(3)", "", {}, ProgramFaultKind.CRASHED),
    ("signal", "ask('say'); reward(1.0)\nos.kill(os.getpid(), 9)", "", {}, ProgramFaultKind.CRASHED),
    (
        "hangs",
        "ask('say'); reward(1.0); print('still here', flush=True); open('HANGS', 'w').close(); time.sleep(600)",
        "still here",
        {},
        ProgramFaultKind.TIMED_OUT,
    ),
    ("silent", "ask('say')", "", {}, ProgramFaultKind.NO_REWARD),
    ("ends without a word", "ask('say'); post(os.environ['EMBODIED_RL_SESSION_URL'] + '/end', {})", "", {}, ProgramFaultKind.NO_REWARD),
    ("never asks", "reward(1.0)", "", {}, ProgramFaultKind.NO_TURNS),
    ("status of exit", "ask('say'); sys.exit(1)", "", {"reward": "exit"}, ProgramFaultKind.CRASHED),
]


@pytest.mark.parametrize(("body", "told", "more", "kind"), [case[1:] for case in FAILING], ids=[case[0] for case in FAILING])
def test_what_goes_wrong_is_a_typed_record_and_never_a_reward(
    tmp_path: Path, body: str, told: str, more: dict[str, Any], kind: ProgramFaultKind
) -> None:
    words, hangs = tokenizer(), tmp_path / "hangs"
    with running(says(words, "red"), words, options(program(tmp_path, body.replace("HANGS", str(hangs))), **more)) as runner:
        (played,) = play(runner, 7, hangs=hangs if kind is ProgramFaultKind.TIMED_OUT else None)
        assert runner.proxy._book.sessions == {}, "its session is gone with it"
    record = fault(played)
    assert (record.kind, record.seed, played.reward) == (kind, 7, 0.0)
    assert told in record.detail
    assert record.num_turns == (0 if kind is ProgramFaultKind.NO_TURNS else 1)
    assert json.loads(json.dumps(record.to_dict()))["kind"] == kind.value


def test_rewards_by_exit_status_and_by_the_programs_own_end(tmp_path: Path) -> None:
    words = tokenizer()
    path = program(tmp_path, "ask('say')\nsys.exit(0 if int(os.environ['EMBODIED_RL_SEED']) % 2 else 3)")
    with running(says(words, "red"), words, options(path, reward="exit")) as runner:
        assert [played.reward for played in play(runner, 1, 2, 3)] == [1.0, 0.0, 1.0]
    path = program(tmp_path, "ask('say'); post(os.environ['EMBODIED_RL_SESSION_URL'] + '/end', {'reward': 0.5})")
    with running(says(words, "red"), words, options(path)) as runner:
        (played,) = play(runner, 4)
        assert (played.reward, captured(played).ended_by) == (0.5, "client")


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    words = tokenizer()
    script = tmp_path / "no_interpreter"
    script.write_text("#!/nowhere/at/all\n")
    script.chmod(0o755)
    with running(says(words, "red"), words, ProgramOptions(command=(str(script),))) as runner:
        (played,) = play(runner, 1)
    assert fault(played).kind is ProgramFaultKind.NOT_STARTED


def test_children_end_with_their_program(tmp_path: Path) -> None:
    words, mark = tokenizer(), f"{os.getpid()}.5"
    body = f"import subprocess\nchild = subprocess.Popen(['sleep', {mark!r}], start_new_session=True)\nask('say'); reward(1.0)\n"
    with running(says(words, "red"), words, options(program(tmp_path, body))) as runner:
        (played,) = play(runner, 1)
    assert played.reward == 1.0
    deadline = time.monotonic() + 60
    while running_with(mark):
        assert time.monotonic() < deadline, "the child outlived its program"
        time.sleep(0.05)


def test_a_program_sees_its_own_files_and_the_proxy_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if strongest() == "prlimit":
        pytest.skip("this machine has limits only")
    words = tokenizer()
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text(name)
    monkeypatch.setenv("OPENAI_ORGANISATION_KEY", "secret")
    monkeypatch.setenv("WANTED", "yes")
    with socket.create_server(("127.0.0.1", 0)) as server:
        body = (
            "import socket\n"
            "def can(what):\n    try: what()\n    except OSError: return False\n    return True\n"
            f"seen = [can(lambda: open({str(tmp_path / 'other' / 'data')!r})), 'OPENAI_ORGANISATION_KEY' in os.environ,\n"
            f"    can(lambda: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)),\n"
            f"    can(lambda: open('/proc/{os.getpid()}/environ').read()), can(lambda: open({str(tmp_path / 'own' / 'new')!r}, 'w'))]\n"
            "ask('say')\n"
            f"own = open({str(tmp_path / 'own' / 'data')!r}).read() == 'own' and os.environ['WANTED'] == 'yes'\n"
            "open(os.environ['HOME'] + '/note', 'w').write('x')\n"
            "reward(1.0 if own and not any(seen) else -1.0); print(seen)\n"
        )
        script = program(tmp_path / "own", body)
        with running(says(words, "red"), words, options(script, writable=(), pass_env=("WANTED",), sandbox="landlock")) as runner:
            (played,) = play(runner, 1)
        assert played.reward == 1.0 + (landlock.version() < 4) * -2.0, played
        opened = options(script, writable=(), readable=(str(tmp_path),), network="open", pass_env=("WANTED",))
        with running(says(words, "red"), words, opened) as runner:
            (played,) = play(runner, 1)
        assert played.reward == -1.0, "what was opened is open"


def test_a_key_opens_its_own_session_alone(tmp_path: Path) -> None:
    words = tokenizer()
    body = (
        "other = os.environ['EMBODIED_RL_SESSION_URL'].rpartition('/')[0] + '/'\n"
        "ask('say'); reward(1.0)\n"
        "for name in ('unknown', 'nobody'):\n"
        "    try:\n        post(other + name + '/reward', {'reward': 9.0})\n"
        "    except Exception as error:\n        assert error.code == 401, error\n"
    )
    with running(says(words, "red"), words, options(program(tmp_path, body))) as runner:
        (played,) = play(runner, 1)
        request = urllib.request.Request(
            f"{runner.proxy.base_url}/chat/completions", b"{}", {"Authorization": "Bearer guessed", "Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=30)
    assert played.reward == 1.0


def test_answers_depend_on_seeds_and_weights_alone(tmp_path: Path) -> None:
    """Greedy sessions take the likeliest tokens, whatever temperature a program asks for."""
    words = tokenizer()
    shape = TinyShape(hidden_size=32, num_layers=1, num_heads=1, intermediate_size=32, spread=0.5)
    make_tiny_model(tmp_path / "model", (), shape=shape, tokenizer=word_tokenizer_of(words))
    path = program(tmp_path, "first = ask('say red')\nask('say red', first, 'say blue'); reward(1.0)")

    def tokens(seeds: list[int], temperature: float) -> list[list[int]]:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        with running(TorchTokens(model), words, options(path)) as runner:
            for number, seed in enumerate(seeds):
                runner.start(number, 1, SessionSampling(seed, temperature))
            ended: dict[Hashable, Played] = {}
            while runner.num_running:
                ended |= {played.tag: played for played in runner.wait(60.0)}
        return [[int(t) for turn in captured(ended[number]).turns for t in turn.sampled_ids] for number in range(len(seeds))]

    sampled = tokens([1, 2, 3], 1.0)
    assert tokens([3, 1], 1.0) == [sampled[2], sampled[0]]
    assert len({str(one) for one in sampled}) == 3
    greedy = tokens([1, 2], 0.0)
    assert greedy[0] == greedy[1]


def word_tokenizer_of(words: Any) -> Any:
    return words._tokenizer


# ---- episodes and groups --------------------------------------------------------------------------------------------


def test_rows_are_the_captured_trajectories(tmp_path: Path) -> None:
    """Two conversations, one of which is gone on with in two ways."""
    words = tokenizer()
    body = (
        "a = ask('say red'); b = ask('say blue')\nc = ask('say red', a, 'say green'); ask('say red', a, 'say one')\n"
        "ask('say red', a, 'say green', c, 'say blue'); ask('say blue', b, 'say red'); reward(2.0)\n"
    )
    with running(says(words, "red", "blue green", "green"), words, options(program(tmp_path, body))) as runner:
        (played,) = play(runner, 1)
    session = captured(played)
    assert [turn.parent for turn in session.turns] == [None, None, 0, 0, 2, 1]
    episode = episode_of_session(session, words, reward=2.0, success=True, seed=1, domain="d")
    rows, wanted = rows_of(episode.turns), session.trajectories()
    assert [row.token_ids.tolist() for row in rows] == [path.token_ids.tolist() for path in wanted]
    assert [row.mask.tolist() for row in rows] == [path.mask.tolist() for path in wanted]
    assert [row.log_prob.tolist() for row in rows] == [path.log_prob.tolist() for path in wanted]
    assert sum(int(row.mask.sum()) for row in rows) == sum(len(turn.sampled_ids) for turn in session.turns)
    assert episode.reward.tolist() == [0.0] * 5 + [2.0]
    assert np.unique(episode.policy_version[episode.mask]).tolist() == [5]
    assert episode.turns[0].answer == "red"

    def drawn_with(sampling: SessionSampling) -> list[tuple[float, list[float]]]:
        turns = tuple(dataclasses.replace(turn, sampling_log_prob=turn.log_prob - 1) for turn in session.turns)
        known = dataclasses.replace(session, turns=turns)
        made = episode_of_session(known, words, reward=2.0, success=True, seed=1, domain="d", sampling=sampling)
        return [(turn.temperature, turn.log_prob.tolist()) for turn in made.turns]

    own = [turn.log_prob for turn in episode.turns]
    assert drawn_with(SessionSampling(0, temperature=0.7)) == [(0.7, (one - 1).tolist()) for one in own]
    assert drawn_with(SessionSampling(0, temperature=0.7, top_k=5)) == [(1.0, one.tolist()) for one in own]
    assert drawn_with(SessionSampling(0, temperature=0.0)) == [(1.0, one.tolist()) for one in own]


def collector(runner: ProgramRunner, words: Any, queue: GroupQueue, num_slots: int = 3) -> ProgramCollector:
    faults = Path(runner.options.tasks).with_name("faults.jsonl") if runner.options.tasks else None
    return ProgramCollector(runner, queue, words, num_slots=num_slots, seed=0, sampling=SessionSampling(0), faults_file=faults)


def new_queue(**more: Any) -> GroupQueue:
    wanted = {"group_size": 3, "groups_per_step": 2, "max_retries": 1, **more}
    return GroupQueue(GroupsConfig(**wanted), seed=0, domains=DomainMixture.single("programs"))


def test_groups_share_their_task_and_failures_are_tried_again(tmp_path: Path) -> None:
    words = tokenizer()
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in range(50)))
    # Every third start of all crashes.
    body = (
        f"counter = {str(tmp_path)!r} + '/started'\n"
        "with open(counter, 'ab') as file:\n"
        "    import fcntl; fcntl.flock(file, fcntl.LOCK_EX); file.write(b'x'); file.flush(); number = file.tell()\n"
        "if number % 3 == 0: raise SystemError('planned')\n"
        "ask('say red'); reward(float(task['number']))\n"
    )
    with running(says(words, "red"), words, options(program(tmp_path, body), tasks=str(tmp_path / "tasks.jsonl"))) as runner:
        queue = new_queue(max_retries=5)
        collecting = collector(runner, words, queue)
        groups = collecting.next_groups(0)
        figures = collecting.figures()
    assert len(groups) == 2
    for group in groups:
        assert len({episode.metadata["task"]["number"] for episode in group.episodes}) == 1
        assert [episode.episode_return for episode in group.episodes] == [float(group.episodes[0].metadata["task"]["number"])] * 3
    counts = queue.episode_counts()
    assert counts.accepted == 6
    faults = read_metrics(tmp_path / "faults.jsonl")
    assert counts.failed == figures["failed_crashed"] == len(faults) >= 2
    assert all("planned" in one["detail"] for one in faults)


def test_superfluous_programs_are_stopped(tmp_path: Path) -> None:
    words = tokenizer()
    slow = (
        f"import pathlib\nflag = pathlib.Path({str(tmp_path)!r}) / 'one'\n"
        "try:\n    flag.touch(exist_ok=False); time.sleep(600)\nexcept FileExistsError:\n    pass\n"
    )
    with running(says(words, "red"), words, options(program(tmp_path, slow + "ask('say'); reward(1.0)"))) as runner:
        queue = new_queue(group_size=2, groups_per_step=1, redundancy=1)
        collecting = collector(runner, words, queue)
        (group,) = collecting.next_groups(0)
        collecting._look()
        assert runner.num_running == 0
    assert len(group.episodes) == 2
    assert (queue.episode_counts().abandoned, queue.episode_counts().failed) == (1, 0)


def test_a_program_that_always_fails_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    words = tokenizer()
    body = "raise RuntimeError('no such table')"
    with running(says(words, "red"), words, options(program(tmp_path, body))) as runner:
        collecting = collector(runner, words, new_queue(max_retries=0, max_rejected_per_step=2))
        with pytest.raises(BatchNeverFullError, match=r"program crashed \(status 1\): RuntimeError: no such table"):
            collecting.next_groups(0)


def test_a_program_that_never_gets_to_the_model_ends_the_run_soon(tmp_path: Path) -> None:
    words = tokenizer()
    with running(says(words, "red"), words, options(program(tmp_path, "import no_such_module"))) as runner:
        collecting = collector(runner, words, new_queue(max_retries=100, max_rejected_per_step=1000))
        with pytest.raises(BatchNeverFullError, match=r"first 8 programs ended without calling the model.*no_such_module"):
            collecting.next_groups(0)
        assert collecting.figures()["failed_crashed"] == 8
        (tmp_path / "faults.jsonl").symlink_to("/dev/full")
        collecting = ProgramCollector(
            runner, new_queue(), words, num_slots=1, seed=0, sampling=SessionSampling(0), faults_file=tmp_path / "faults.jsonl"
        )
        with pytest.raises(UserError, match=r"Cannot write '.*faults\.jsonl': No space left on device"):
            collecting.next_groups(0)


# ---- configuration --------------------------------------------------------------------------------------------------


def test_tasks_by_seed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"n": 3}\n{"n": 4}\n{"n": 5}\n')
    book = TaskBook(ProgramOptions(("x",), tasks=str(tmp_path / "a.jsonl"), held_out_tasks=str(tmp_path / "b.jsonl")))
    assert {book.task(seed)["n"] for seed in range(20)} == {1, 2}
    assert [book.task(HELD_OUT_START + number)["n"] for number in range(4)] == [3, 4, 5, 3]
    assert TaskBook(ProgramOptions(("x",))).task(3) == {}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"command": []}, "command must be a list of words"),
        ({"command": "python agent.py"}, "command, a list of words: .python agent.py. is not a program that can be run here"),
        ({"command": ["no-such-program-here"]}, "not a program that can be run"),
        ({"command": ["{python}", "missing.py"]}, r"'missing.py' does not exist"),
        ({"command": ["{python}", "{taks}"]}, r"Placeholders: \{python\}, \{task\}"),
        ({"command": ["{python}"], "reward": "htp"}, "Did you mean 'http'"),
        ({"command": ["{python}"], "timeout_s": 0}, "timeout_s must be above 0"),
        ({"command": ["{python}"], "timeout_s": "soon"}, "timeout_s must be a number, got 'soon'"),
        ({"command": ["{python}"], "env": {"PORT": 8080}}, r"env.PORT must be text, got 8080"),
        ({"command": ["{python}"], "task": "x"}, "Did you mean 'tasks'"),
    ],
)
def test_mistakes_are_told(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ProgramOptions.of(SimConfig(name="p", target=TARGET, kwargs=kwargs))


def test_task_files_are_checked(tmp_path: Path) -> None:
    for text, message in (
        ("", "has no tasks"),
        ('{"a": 1}\n[1]', r"line 2: a task must be a JSON object"),
        ("{", "line 1 is not JSON"),
    ):
        (tmp_path / "t.jsonl").write_text(text)
        with pytest.raises(UserError, match=message):
            TaskBook(ProgramOptions(("x",), tasks=str(tmp_path / "t.jsonl")))
    with pytest.raises(UserError, match="cannot be read"):
        TaskBook(ProgramOptions(("x",), tasks=str(tmp_path / "none")))


def test_a_program_is_no_simulator() -> None:
    with pytest.raises(UserError, match="experiment=agent_program"):
        SimFactory(TARGET).make(1)
