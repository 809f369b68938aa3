"""Roles in processes of this machine, ``python -m MODULE SOCKET``: the handle, and the process's own side.

Requests and answers are values over a socket (`RoleLink`); weights and their version go through shared memory.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from embodied_rl.distributed.channel import ChannelClosed, can_be_read
from embodied_rl.distributed.processes import end_process, start_module, started
from embodied_rl.hybrid.shared_weights import AnnouncedWeights, SharedWeightsPublisher
from embodied_rl.roles.wire import RoleLink, RoleLost, decode_error, encode_error
from embodied_rl.stopping import waiting

_END_S = 20.0
Reply = Callable[[Any, BaseException | None], None]
"""Sends an answer: (value, exception)."""


class RoleProcess:
    """Process of a role, started at once; ends with `close` or with this object. Every request has an answer, in their order."""

    only_changed = False
    """Whether `put` writes only what has changed."""

    def __init__(self, module: str, who: str, *, gpu: str | None = None, **begin: object) -> None:
        """
        Args:
            module: module to run; its argument is the number of its end of the socket.
            who: subject of the sentence that reports its end.
            gpu: the only GPU that it sees; None: the same GPUs as this process.
            begin: arguments for the role's maker (`run_role`).
        """
        self.socket, theirs = socket.socketpair()
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        with theirs:
            self.process = start_module(module, theirs.fileno(), pass_fds=(theirs.fileno(),), environment=environment)
        self._who, self._link = who, RoleLink(self.socket, begins=True)
        self._finalizer = weakref.finalize(self, _end, self._link, self.process)
        self._weights: SharedWeightsPublisher | None = None
        self._names: set[str] = set()
        self._num_sent = self._num_received = 0
        self.answers: dict[int, tuple[str, Any]] = {}
        """{number of a request: ("value" or "error", …)} that nothing has taken yet."""
        self._is_made = False
        self._send("begin", begin)

    def begin(self, what: str, **arguments: object) -> RoleCall:
        """Begin a call of the role's method `what`. Raises RoleLost, and the error of a role that could not be made."""
        if not self._is_made:
            RoleCall(self, 1).value()
            self._is_made = True
        return self._send(what, arguments)

    def call(self, what: str, **arguments: object) -> Any:
        """Call the role's method `what`. Raises RoleLost, and any exception of the method."""
        return self.begin(what, **arguments).value()

    def read(self) -> None:
        """Receive the next answer. Raises RoleLost."""
        try:
            with waiting:
                answer = self._link.recv_value()
        except ChannelClosed as error:
            raise self._lost() from error
        self._num_received += 1
        self.answers[self._num_received] = answer

    def _send(self, what: str, arguments: Mapping[str, object]) -> RoleCall:
        try:
            self._link.send_value((what, arguments), self.read)
        except ChannelClosed as error:
            raise self._lost() from error
        self._num_sent += 1
        return RoleCall(self, self._num_sent)

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
        """Write weights into shared memory; return (path, for a request `load` in place of the tensors, number of bytes written). Other
        processes may load them too. Raises RoleLost: those who read them do not take them."""
        if self._weights is None or self._names != tensors.keys():  # after the whole policy, only its adapter
            # Create the new publisher before closing the old one: readers know a publisher by its path, so the paths must differ.
            publisher = SharedWeightsPublisher(tensors)
            self._end_publisher()
            self._weights, self._names = publisher, set(tensors)
        try:
            num_bytes = self._weights.publish(version, tensors.items(), only_changed=self.only_changed)
        except TimeoutError as error:
            raise RoleLost(f"{self._who} does not take weights: {error}") from error
        return self._weights.path, num_bytes

    def close(self) -> None:
        """End the process. May be called twice."""
        self._finalizer()
        self._end_publisher()

    def _end_publisher(self) -> None:
        if self._weights is not None:
            self._weights.close()

    def _lost(self) -> RoleLost:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the connection closes a little before the process ends
            self.process.wait(_END_S)
        code = self.process.returncode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        return RoleLost(f"{self._who} {how}.")


class RoleCall:
    """A call that may be under way. Implements `Call`."""

    def __init__(self, role: RoleProcess, number: int) -> None:
        self._role, self._number = role, number

    def is_over(self, timeout_s: float) -> bool:
        until, answers = time.monotonic() + timeout_s, self._role.answers
        while self._number not in answers and can_be_read(self._role.socket.fileno(), timeout_s=until - time.monotonic()):
            self._role.read()
        return self._number in answers

    def value(self) -> Any:
        while self._number not in self._role.answers:
            self._role.read()
        kind, value = self._role.answers.pop(self._number)
        if kind == "error":
            raise decode_error(value)
        return value


def _end(link: RoleLink, process: subprocess.Popen[bytes]) -> None:
    link.close()
    end_process(process, _END_S)


# ---- the process's side ---------------------------------------------------------------------------------------------


class Role(Protocol):
    """Works in a process or an actor, and answers requests in between."""

    @property
    def asked(self) -> Mapping[str, Callable[..., Any]]:
        """Methods that may be called by name."""

    @property
    def works_after(self) -> Collection[str]:
        """Names of those after which it may work on; after others it waits for the next request."""

    def pump(self) -> bool:
        """Work for a moment between requests; False: there is nothing to do until the next one."""

    def close(self) -> None: ...


class Inbox(Protocol):
    """Source of requests."""

    def take(self, wait: bool) -> tuple[str, dict[str, Any], Reply] | None:
        """Next request (method, arguments, reply function); None: none is there and `wait` is false. Raises EOFError without clients."""


def serve(role: Role, inbox: Inbox) -> None:
    """Serve requests in order, and let the role work between them, until `Inbox.take` raises EOFError."""
    works, failure = False, None
    while True:
        try:
            request = inbox.take(wait=not works)
        except EOFError:
            return
        if request is None:
            try:
                works = role.pump()
            except BaseException as error:
                # The next request gets the error as its answer.
                works, failure = False, error
            continue
        what, arguments, answer = request
        if failure is not None:
            answer(None, failure)
            failure = None
            continue
        try:
            value = role.asked[what](**arguments)
        except Exception as error:
            works = False
            answer(None, error)
        else:
            works = what in role.works_after
            answer(value, None)


def run_role(descriptor: int, make: Callable[..., Role]) -> None:
    """Serve a role in this process until the other end of the socket is closed.
    `make(link, **begin)`: makes the role with the arguments given to its `RoleProcess`."""
    link = RoleLink(socket.socket(fileno=descriptor))
    with contextlib.suppress(ChannelClosed, EOFError):
        _, begin = link.recv_value()
        try:
            role = make(link, **begin)
        except Exception as error:
            link.send_value(("error", encode_error(error)))
            return
        try:
            started()
            link.send_value(("value", None))
            serve(role, _LinkInbox(link))
        finally:
            role.close()


class LentTensors:
    """(name, tensor) pairs of a publisher: its own memory until `give_back`, from which a GPU loads at the speed of its link; copies
    afterwards, unless they were read before."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self._were_read = tensors, False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._were_read = True
        return iter(self._tensors.items())

    def give_back(self) -> None:
        self._tensors = {} if self._were_read else {name: tensor.clone() for name, tensor in self._tensors.items()}


class _LinkInbox(Inbox):
    """Requests from the socket; `load` names weights in shared memory, and the role gets the tensors."""

    def __init__(self, link: RoleLink) -> None:
        self._link, self._announced = link, AnnouncedWeights()

    def take(self, wait: bool) -> tuple[str, dict[str, Any], Reply] | None:
        if not wait and not self._link.has_message():
            return None
        try:
            what, arguments = self._link.recv_value()
        except ChannelClosed as error:
            raise EOFError from error
        if what == "load":
            return what, *self._load(**arguments)
        return what, arguments, self._answer

    def _load(self, version: int, tensors: str) -> tuple[dict[str, Any], Reply]:
        hold = contextlib.ExitStack()
        lent = LentTensors(hold.enter_context(self._announced.hold(version, tensors)).tensors)

        def answer(value: object, error: BaseException | None) -> None:
            lent.give_back()
            hold.close()
            self._answer(value, error)

        return {"version": version, "tensors": lent}, answer

    def _answer(self, value: object, error: BaseException | None) -> None:
        try:
            self._link.send_value(("value", value) if error is None else ("error", encode_error(error)))
        except ChannelClosed as closed:
            raise EOFError from closed
