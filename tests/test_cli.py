"""Command lines read key=value words, and every kind of error has its one message and exit status."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import pytest

import embodied_rl
from embodied_rl.bounds import Bounds
from embodied_rl.commands.cli import Argument, Command, WrittenFile, WrittenFolder, command_line, loading, run_command
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import MissingExtraError, NonFiniteError, UserError, did_you_mean
from embodied_rl.registry import load_target
from embodied_rl.sim.faults import FaultKind, SimFault

COMMAND = Command(
    name="paint",
    summary="Paint a wall.",
    arguments=(
        Argument("wall", str, "which one"),
        Argument("num_coats", Annotated[int, Bounds(1, 9_999)], "how often", 2),
        Argument("width_m", Annotated[float, Bounds(0, 100, above=True)], "how wide", 1.5),
        Argument("dry", bool, "wait in between", True),
        Argument("colour", str, "of the paint", "red", choices=("red", "green")),
    ),
    prefixes={"brush.": "a property of the brush"},
    examples=("wall=north", ""),
)


def test_words_become_typed_values_and_the_rest_keeps_its_default() -> None:
    values, further = COMMAND.parse(["wall=a=b", "num_coats=1_000", "width_m=2", "dry=no", "brush.size=3", "brush.tip=[1, soft]"])
    assert values == {"wall": "a=b", "num_coats": 1000, "width_m": 2.0, "dry": False, "colour": "red"}
    assert isinstance(values["width_m"], float)
    assert further == {"brush.size": 3, "brush.tip": [1, "soft"]}


def test_families_read_values_as_train_does() -> None:
    """YAML would make of these a text, the number 8, a date (or, of the 45th, a ValueError), true, 45045, a text, no value."""
    words = ["1e-3", "010", "2020-01-01", "2020-13-45", "on", "12:30:45", "a,b", "#a"]
    _, further = COMMAND.parse(["wall=a", *(f"brush.x{at}={word}" for at, word in enumerate(words))])
    assert list(further.values()) == [0.001, *words[1:]]
    words.remove("a,b")  # several runs of `train`
    composed = load_train_config(["sim=cartpole", *(f"sim.kwargs.x{at}={word}" for at, word in enumerate(words))])
    assert list(composed.sim.kwargs.values()) == [0.001, *words[1:]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"wall=… is missing\. Known: wall, num_coats"),
        (["wall=a", "num_coat=1"], "Argument 'num_coat' is not known. Did you mean 'num_coats'?"),
        (["wall=a", "num_coats=1.5"], "num_coats must be an integer, got '1.5'"),
        (["wall=a", "width_m=wide"], "width_m must be a number, got 'wide'"),
        (["wall=a", "num_coats=0"], "num_coats must be between 1 and 9,999, got 0"),
        (["wall=a", "num_coats=" + "9" * 5000], "num_coats must be an integer, got '999"),
        (["wall=a", "num_coats=٣"], "num_coats must be an integer, got '٣'"),
        (["wall=a", "width_m=nan"], "width_m must be above 0 and at most 100, got nan"),
        (["wall=a", "width_m=inf"], "width_m must be above 0 and at most 100, got inf"),
        (["wall=a", "dry=perhaps"], "dry must be true or false, got 'perhaps'"),
        (["wall=a", "colour=gren"], "colour=gren is not a choice. Did you mean 'green'?"),
        (["wall=a", "num_coats=2", "num_coats=3"], "'num_coats' is given twice: '2' and '3'. Remove one."),
        (["wall=a", "brush.size=3", "brush.size=4"], "'brush.size' is given twice"),
        (["wall="], "wall must have a value"),
        (["north"], "'north' is not of the form key=value"),
        (["/proc"], "'/proc' is not of the form key=value. Type: wall=/proc. See --help"),
        (["wall=a", "brush.tip=[1"], r"The value of 'brush\.tip' cannot be read: '\[1'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        COMMAND.parse(words)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 400


def test_a_folder_where_a_file_is_written_is_told_before_the_work(tmp_path: Path) -> None:
    command = Command(
        "paint", "Paint.", (Argument("output", WrittenFile, "the picture", None), Argument("into", WrittenFolder, "pictures", None))
    )
    (tmp_path / "there").write_text("")
    assert command.parse([f"output={tmp_path}/new", f"into={tmp_path}"])[0]["into"] == str(tmp_path)
    assert command.parse([f"output={tmp_path}/there", f"into={tmp_path}/new"])[0]["output"] == f"{tmp_path}/there"
    with pytest.raises(UserError, match=f"^output must be a file, but {tmp_path} is a folder. Name a file in it: output={tmp_path}/NAME$"):
        command.parse([f"output={tmp_path}"])
    with pytest.raises(UserError, match=f"^into must be a folder, but {tmp_path}/there is a file"):
        command.parse([f"into={tmp_path}/there"])
    with pytest.raises(UserError, match=f"^output: cannot write '{tmp_path}/there/new/x': {tmp_path}/there is not a folder"):
        command.parse([f"output={tmp_path}/there/new/x"])
    with pytest.raises(UserError, match=r"^into: cannot write '/proc/sys/x': /proc/sys is not a folder that this user may write to\."):
        command.parse(["into=/proc/sys/x"])


def test_help_names_every_argument_default_and_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        COMMAND.parse(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for part in (
        "wall=STR",
        "(required)",
        "num_coats=INT",
        "(default: 2)",
        "(default: true)",
        "colour=red|green",
        "brush.KEY=VALUE",
        "embodied_rl.paint wall=north",
        "embodied_rl.paint\n",
    ):
        assert part in text, part


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def body() -> NoReturn:
        raise error

    return body


def noted(error: NonFiniteError) -> NonFiniteError:
    error.add_note("The offending batch lies in failures.")
    return error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("no such wall"), 2, "error: no such wall\n"),
        (
            MissingExtraError("Paint", "paint"),
            2,
            'error: Paint needs packages that are not installed. Install them: pip install "embodied-rl[paint]"\n',
        ),
        (noted(NonFiniteError("the loss is NaN")), 1, "error: the loss is NaN\nThe offending batch lies in failures.\n"),
        (SimFault(FaultKind.DIED, 3, "signal 11"), 1, "error: Simulator worker 3 died.\n--- simulator worker 3 ---\nsignal 11\n"),
        (KeyboardInterrupt(), 130, "error: Interrupted.\n"),
    ],
)
def test_each_kind_of_error_has_its_message_and_status(
    error: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_command(raising(error))
    assert stopped.value.code == status
    assert capsys.readouterr().err == message


def test_an_extra_is_recommended_for_what_a_target_imports_not_for_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "easel.py").write_text("import easel_paint\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtraError, match="No module named 'easel_paint'"):
        load_target("easel:Easel", "paint")
    for target in ("easle:Easel", "easle.sims.one:Easel"):
        with pytest.raises(UserError, match="cannot be imported: No module named 'easle'") as raised:
            load_target(target, "paint")
        assert not isinstance(raised.value, MissingExtraError)
    for target in (".easel:Easel", "..:Easel", ":Easel", "easel", "a/easel:Easel"):
        with pytest.raises(UserError, match="is not of the form"):
            load_target(target)


def test_our_own_mistakes_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(raising(ZeroDivisionError()))


def test_our_warnings_are_a_line_and_those_of_libraries_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    def warn() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            ours = Path(embodied_rl.__file__).parent / "sim" / "manager.py"
            warnings.warn_explicit("more workers than cores", UserWarning, str(ours), 7)
            warnings.warn_explicit("of a library", UserWarning, "library.py", 7)
            warnings.warn_explicit("is going away", DeprecationWarning, str(ours), 7)

    def show(message, category, filename, lineno, file=None, line=None) -> None:  # pytest's own collects them instead
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    before = warnings.formatwarning
    run_command(warn)
    written = capsys.readouterr().err
    assert written.startswith("warning: more workers than cores\nlibrary.py:7: UserWarning: of a library\n")
    assert "manager.py:7: DeprecationWarning: is going away\n" in written
    assert warnings.formatwarning is before


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    program = "from embodied_rl.commands.cli import run_command\nrun_command(lambda: [print('x' * 1000) for _ in range(10_000)])"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(120) == 0


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("print('x' * 100_000)", 1, "error: The output could not be written completely: No space left on device.\n"),
        ("COMMAND.parse(['--help'])", 1, "error: The output could not be written completely: No space left on device.\n"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "error: Terminated.\n"),
    ],
)
def test_a_full_disk_and_a_polite_end_are_one_line(body: str, status: int, message: str) -> None:
    needed = "import os, signal; from embodied_rl.commands.cli import run_command; from embodied_rl.commands.report import COMMAND"
    code = f"{needed}; run_command(lambda: {body})"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (status, message)


SERVE = """
import faulthandler, os, signal, sys, threading
from embodied_rl.commands.cli import serve_until_stopped

faulthandler.dump_traceback_later(60, exit=True)


def end():
    os.kill(os.getpid(), signal.SIGTERM)


def is_reached(number):
    num_lines, late = 0, threading.Timer(0.5, end)

    def trace(frame, event, arg):
        nonlocal num_lines
        if event == "line" and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            num_lines += 1
            late.start() if num_lines == 1 else None
            end() if num_lines == number else None
        return trace

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.settrace(trace)
    serve_until_stopped(lambda: sys.settrace(None), "Serving", None, "")
    late.cancel()
    late.join()
    return num_lines >= number


number = 1
while is_reached(number):
    number += 1
print(number)
"""


def test_a_server_can_be_ended_at_any_moment() -> None:
    """At each line that it executes after its handler of SIGTERM is set, until it waits."""
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout.split()[-1]) > 2


def test_the_command_can_be_typed_again() -> None:
    assert command_line("train", ["sim=ant", "run_dir=my runs"]) == "python -m embodied_rl.train sim=ant 'run_dir=my runs'"


def test_every_field_of_a_simulators_configuration_can_be_overridden() -> None:
    """Hydra refuses keys that are in no file, so each field of `SimConfig` needs a line in train.yaml or in every sim's own file."""
    import dataclasses

    from embodied_rl.compose import compose_config
    from embodied_rl.config import SimConfig

    assert {field.name for field in dataclasses.fields(SimConfig)} == set(compose_config([])["sim"])


# --- paths without a key ---------------------------------------------------------------------------------------------


def test_paths_are_taken_in_their_order_and_may_hold_an_equals_sign(tmp_path: Path) -> None:
    wall, fence = Argument("wall", str, "which one"), Argument("fence", str, "and which")
    command = Command("paint", "Paint.", (Argument("colour", str, "of the paint", "red"),), paths=(wall, fence))
    (tmp_path / "lr=3").mkdir()
    values, _ = command.parse([str(tmp_path / "lr=3"), "colour=green", "north"])
    assert values == {"wall": str(tmp_path / "lr=3"), "fence": "north", "colour": "green"}
    for words, message in (
        (["north"], "Argument FENCE is missing. Known: WALL, FENCE, colour"),
        (["a", "b", "c"], "'c' is not of the form key=value"),
        (["a", "colur=green"], "Argument 'colur' is not known. Did you mean 'colour'?"),
    ):
        with pytest.raises(UserError) as caught:
            command.parse(words)
        assert message in str(caught.value)
    assert command.usage().startswith("usage: python -m embodied_rl.paint WALL FENCE key=value …")


def test_the_last_path_may_take_all_that_follow() -> None:
    command = Command("paint", "Paint.", (), paths=(Argument("wall", str, "which ones"),), many_paths=True)
    assert command.parse(["a", "b", "c"])[0] == {"wall": ["a", "b", "c"]}
    with pytest.raises(UserError, match="Argument WALL is missing"):
        command.parse([])
    assert command.usage().startswith("usage: python -m embodied_rl.paint WALL … key=value …")


def test_long_messages_lose_their_middle_and_keep_what_is_wrong_and_how_to_mend_it() -> None:
    names = [f"simulator_{number}" for number in range(200)]
    assert len(str(UserError("short"))) == 5
    listed = str(UserError(f"Simulator 'x' is not known. Known: {', '.join(names)}. See --help."))
    assert listed.startswith("Simulator 'x' is not known. Known: simulator_0, simulator_1, simulator_2, simulator_3, … ")
    assert listed.endswith("See --help.")
    path = str(UserError(f"There is nothing at {'/very/long' * 100}. Choose another."))
    assert path.startswith("There is nothing at /very/long/very")
    assert path.endswith("Choose another.")
    text = str(UserError(f"Begin. {'word ' * 500} The end."))
    assert text.startswith("Begin. word")
    assert text.endswith("word  The end.")
    assert all(len(message) <= 400 for message in (listed, path, text, str(UserError("x" * 5000)), str(UserError("x " * 5000))))
    assert did_you_mean("simulator_8", ["a", "b"]) == " Known: a, b."
    assert did_you_mean("CARTPOL", ["ant", "CartPole-v1"]) == " Did you mean 'CartPole-v1'? Known: CartPole-v1, ant."
    near = did_you_mean("simulator_7x", names)
    assert near.startswith(" Did you mean 'simulator_7'? Known: simulator_")
    assert near.endswith(", … (200 in all).")
    assert len(did_you_mean("x" * 10**6, names)) < 200


def test_help_without_a_command_of_its_own_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of commands, which can be pasted, stay whole."""
    from embodied_rl.commands import catalog, episode_tools

    monkeypatch.setenv("COLUMNS", "80")
    for text in (catalog.usage(), episode_tools.usage()):
        assert [line for line in text.splitlines() if len(line) > 80 and "python -m" not in line] == []


def test_a_reader_that_leaves_and_streams_that_are_closed_cost_only_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = []

    def body() -> None:
        for stream in (sys.stdout, sys.stderr):
            print("x" * 100_000, file=stream, flush=True)
            print("unread", file=stream, flush=True)
        done.append(True)

    with open(writing, "w", encoding="ascii") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", None)
        run_command(body)
        sys.stderr.close()
    assert done == [True]


def test_nothing_is_collected_while_libraries_load_and_at_a_commands_end() -> None:
    before = gc.get_freeze_count()
    with loading("a caller's libraries", shown=False):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == before, "what a caller has made is collected as ever"

    def body() -> None:
        with loading("a command's libraries", shown=False):
            pass
        assert gc.get_freeze_count() > before

    run_command(body)
    # What is registered first is called last.
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count())); import embodied_rl.commands.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > 1000


def test_output_that_is_not_buffered_stays_so() -> None:
    """What a container with PYTHONUNBUFFERED=1 prints is seen even if it is killed."""
    script = "import os; from embodied_rl.commands.cli import run_command; run_command(lambda: (print('seen', end=''), os._exit(0)))"
    done = subprocess.run([sys.executable, "-u", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "seen"
