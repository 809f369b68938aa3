"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.checkpoint.folder import PARTS, checkpoint_name, save_checkpoint, write_description
from embodied_rl.files import cannot_write

if TYPE_CHECKING:
    from torch import Tensor


class CheckpointWriter:
    """Saves the checkpoints of one run, in a separate thread where asked; one at a time, in order.

    ```
     training:  save(1) ─ copies ─▶ goes on ………… save(2) ─ waits for 1, copies ─▶ goes on ………… wait()
     thread:              └─ files, SHA-256, flush, rename, `last` ─┘   └─ … ─┘
    ```
    """

    def __init__(self, run_dir: Path, *, asynchronous: bool = False) -> None:
        self.run_dir, self.asynchronous = run_dir, asynchronous
        self._thread: threading.Thread | None = None
        self._failure: list[BaseException] = []
        for leftover in (run_dir / "checkpoints").glob(f"{PARTS}*"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)

    def parts_folder(self, step: int) -> Path:
        """Where the ranks may write their parts of the next checkpoint. Waits as `save`."""
        self.wait()
        return self.run_dir / "checkpoints" / f"{PARTS}{checkpoint_name(step)}"

    def save(
        self,
        step: int,
        *,
        policy: Mapping[str, Tensor],
        learner: Mapping[str, Tensor],
        describe: Callable[[Path], None] | None = None,
        **content: Any,
    ) -> None:
        """Write a checkpoint (`save_checkpoint`); with `asynchronous`, copy the tensors, describe the policy and return.

        Raises:
            UserError: it cannot be written; or the one before could not.
        """
        self.wait()
        if not self.asynchronous:
            save_checkpoint(self.run_dir, step, policy=policy, learner=learner, describe=describe, **content)
            return
        described = None if describe is None else self._described(describe)
        copied = [{name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()} for tensors in (policy, learner)]

        def write() -> None:
            try:
                move = None if described is None else lambda folder: _move_files(described, folder)
                save_checkpoint(self.run_dir, step, policy=copied[0], learner=copied[1], describe=move, **content)
            except BaseException as error:  # `wait` raises it, in the thread that asked
                self._failure.append(error)
            finally:
                if described is not None:
                    shutil.rmtree(described, ignore_errors=True)

        # Not a daemon: a program that ends waits for it.
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=False)
        self._thread.start()

    def _described(self, describe: Callable[[Path], None]) -> Path:
        """The policy's description, written here and now: tokenizers cannot be read while others use them."""
        root = self.run_dir / "checkpoints"
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{PARTS}model-", dir=root))
            write_description(describe, folder)
        except OSError as error:
            raise cannot_write(root, error) from error
        return folder

    def wait(self) -> None:
        """Until everything is written. Raises what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure:
            raise self._failure.pop()


def _move_files(source: Path, target: Path) -> None:
    for path in source.iterdir():
        path.rename(target / path.name)
