"""Who may read what is written: the user's umask decides, whatever library wrote the file."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from embodied_rl.commands.cli import Written
from embodied_rl.errors import UserError
from embodied_rl.files import reset_mode, write_atomic, write_atomic_with
from tests.forks import run_forked

WRITERS = """
import os
import sys
from pathlib import Path
import torch
from embodied_rl.config import LanguageConfig
from embodied_rl.learning.sharded_checkpoint import save_sharded
from embodied_rl.policies.language import build_language_policy
from embodied_rl.policies.model_folder import save_state
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model
from tests.short_run import train_shortly

for umask in (0o022, 0o077):
    os.umask(umask)
    folder = Path(sys.argv[1], oct(umask))
    folder.mkdir()
    train_shortly(folder / "run", "experiment=cartpole", "evaluation.num_episodes=2", "video.enabled=no")
    save_state({"weight": torch.zeros(3)}, folder / "state.safetensors")
    model = make_tiny_model(folder / "tiny", ["a b c"], shape=TinyShape(max_context=32))
    policy = build_language_policy(LanguageConfig(str(model), lora_rank=2, value_head="linear"))
    policy.save_model(folder / "whole")
    policy.save_adapter(folder / "adapter")
    save_sharded(folder / "sharded", {"weight": torch.ones(4)})
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its checkpoints, and each way of writing a model's folder, below a folder for each umask."""
    folder, program = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("program")
    (program / "writers.py").write_text(WRITERS, encoding="utf-8")
    done = run_forked("writers", str(folder), cwd=program)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_files_have_the_mode_that_the_umask_says(umask: int, written: Path) -> None:
    """Compared with a file that `open` made."""
    folder = written / oct(umask)
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    names = {path.name for path in files}
    assert {"policy.safetensors", "results.json", "model.safetensors", "adapter_model.safetensors", "value_head.safetensors"} <= names
    assert {"run", "whole", "adapter", "tiny", "sharded"} <= {path.relative_to(folder).parts[0] for path in files}
    modes = {str(path.relative_to(folder)): oct(stat.S_IMODE(path.stat().st_mode)) for path in files}
    expected = {0o022: "0o644", 0o077: "0o600"}[umask]
    assert {name: mode for name, mode in modes.items() if mode != expected} == {}
    folders = {oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()}
    assert folders == {{0o022: "0o755", 0o077: "0o700"}[umask]}


def test_only_private_files_are_touched(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        shared, private, nested = tmp_path / "shared", tmp_path / "private", tmp_path / "deep" / "private"
        nested.parent.mkdir()
        for path, mode in ((shared, 0o664), (private, 0o600), (nested, 0o400)):
            path.write_bytes(b"x")
            path.chmod(mode)
        reset_mode(tmp_path)
        assert [oct(stat.S_IMODE(path.stat().st_mode)) for path in (shared, private, nested)] == ["0o664", "0o640", "0o640"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "private", "shared"], "nothing is left behind"
        written = write_atomic(tmp_path / "new.json", json.dumps({}))
        assert oct(stat.S_IMODE(written.stat().st_mode)) == "0o640"
    finally:
        os.umask(before)


def test_a_pipe_or_device_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    """Root may write /dev, and ``output=/dev/null`` would take the device from the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="it is not a regular file"):
        write_atomic(tmp_path / "pipe", "{}")
    with pytest.raises(UserError, match=r"^output must be a file, but .*/pipe is a device or a pipe\. Choose another name\.$"):
        Written("file").check("output", str(tmp_path / "pipe"))
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_threads_that_write_a_file_at_once_write_it_whole(tmp_path: Path) -> None:
    other = threading.Thread(target=lambda: write_atomic(tmp_path / "file", "of the other"))

    def write(temporary: Path) -> None:
        temporary.write_text("half ")
        other.start()
        other.join()
        assert (tmp_path / "file").read_text() == "of the other"
        with temporary.open("a") as file:
            file.write("and half")

    write_atomic_with(tmp_path / "file", write)
    assert (tmp_path / "file").read_text() == "half and half"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
