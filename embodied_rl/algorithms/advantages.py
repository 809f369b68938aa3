"""Credit assignment over time: generalised advantage estimation, discounted returns, whitening. Pure functions.

All functions take numpy arrays or torch tensors, and return the same kind. On the CPU the recursions are compiled (`kernels`), on a GPU
they are scans of logarithmic depth (`reverse_scan`); both give the same numbers up to rounding. Sums are float64 inside.
Advantages are constants to the learner: nothing here is differentiated.

`grouped` has credit by comparing episodes with each other and by chunks of tokens, `anchors` credit by comparing equal states.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

# ---- arrays of numpy or torch -----------------------------------------------------------------------------------------


Array = TypeVar("Array", np.ndarray, Tensor)
"""A numpy array or a torch tensor: all arguments of a call are of one kind, and so are the results."""

_FLOATS = frozenset({np.dtype(np.float32), np.dtype(np.float64), torch.float32, torch.float64})
_FLAGS = frozenset({np.dtype(np.bool_), torch.bool})


def check_types(numbers: Iterable[Any], flags: Iterable[Any]) -> None:
    """Raise ValueError if kinds are mixed, a number is not float32 or float64, or a flag is not bool."""
    numbers, flags = tuple(numbers), tuple(flags)
    kinds = {isinstance(array, Tensor) for array in (*numbers, *flags)}
    if len(kinds) > 1:
        raise ValueError("All arguments must be numpy arrays, or all torch tensors; got both.")
    for array in numbers:
        if array.dtype not in _FLOATS:
            raise ValueError(f"Rewards and values must be float32 or float64, got {array.dtype}. Convert them first.")
    for array in flags:
        if array.dtype not in _FLAGS:
            raise ValueError(f"terminated, truncated, executed and mask must be bool, got {array.dtype}. Convert them first.")


def check_final_value(shape: tuple[int, ...], num_cut: int) -> None:
    """Raise ValueError unless there is one final value for each truncated step."""
    if shape != (num_cut,):
        raise ValueError(f"final_value must hold one value for each of the {num_cut} truncated steps, got shape {shape}.")


def as_numpy(array: np.ndarray | Tensor) -> np.ndarray:
    """The same numbers, contiguous; shared if possible. A tensor must be on the CPU."""
    # One memory layout, because numba recompiles the kernel for each.
    return np.ascontiguousarray(array.detach().numpy() if isinstance(array, Tensor) else array)


def alike(result: np.ndarray, given: Array) -> Array:
    """Convert `result` to the kind of `given`."""
    return torch.from_numpy(result) if isinstance(given, Tensor) else result


WHITEN_EPS = 1e-8

_NO_MASK = np.zeros((0, 0), bool)
_THREADS_FROM = 2**20
"""Entries from which several threads are faster: starting one takes as long as some hundred thousand entries. Slots are independent."""


def gae(
    *,
    reward: Array,
    value: Array,
    last_value: Array,
    terminated: Array,
    truncated: Array,
    final_value: Array,
    gamma: float,
    gae_lambda: float,
    mask: Array | None = None,
    discount: Array | None = None,
) -> tuple[Array, Array]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16), time-major.

    delta_t = r_t + gamma V_(t+1) (1 - terminated_t) - V_t and A_t = delta_t + gamma lambda (1 - done_t) A_(t+1). A step
    that is truncated but not terminated bootstraps from the value of its episode's final observation, since the slot's
    next observation already belongs to another episode.

    Args:
        reward, value: [T, N] float32 or float64.
        last_value: [N] value after the last step.
        terminated, truncated: [T, N] bool.
        final_value: [K] values of the final observations, in the order of ``np.argwhere(truncated & ~terminated)``.
        mask: [T, N] bool; steps that count; None: all steps. Other steps, even NaN, pass value and advantage through, and get 0.
            Their flags do not count either, so an episode's end must be marked at a step that counts.
        discount: [T, N] gamma of each step instead of one gamma; `chunk_gae` needs it.

    Returns advantages and returns (advantage + value, 0 where masked), both [T, N] of the type of `value`.

    Raises ValueError: shapes or types do not agree, or the number of final values differs from that of truncated steps.
    """
    _check_gae(reward, value, last_value, terminated, truncated, mask, discount)
    arrays: dict[str, Any] = {
        "reward": reward,
        "value": value,
        "last_value": last_value,
        "terminated": terminated,
        "truncated": truncated,
        "final_value": final_value,
        "mask": mask,
        "discount": discount,
    }
    if isinstance(reward, Tensor) and reward.device.type != "cpu":
        return gae_scan(**arrays, gamma=gamma, gae_lambda=gae_lambda)
    found = _gae_compiled({name: None if array is None else as_numpy(array) for name, array in arrays.items()}, gamma, gae_lambda)
    return alike(found[0], value), alike(found[1], value)


def _gae_compiled(arrays: dict[str, Any], gamma: float, gae_lambda: float) -> tuple[np.ndarray, np.ndarray]:
    from embodied_rl.algorithms.kernels import find_cuts, gae_kernel, masked_gae_kernel

    value, mask, discount, final_value = arrays["value"], arrays["mask"], arrays["discount"], arrays["final_value"]
    reward, terminated, truncated = arrays["reward"], arrays["terminated"], arrays["truncated"]
    cut = np.empty(final_value.size, np.int64)
    check_final_value(final_value.shape, find_cuts(truncated.reshape(-1), terminated.reshape(-1), cut))
    advantage, returns = np.empty_like(value), np.empty_like(value)
    last_value, final_value = arrays["last_value"].astype(np.float64), final_value.astype(np.float64)
    if mask is None and discount is None:
        flat = [array.reshape(-1) for array in (reward, value, terminated, truncated, advantage, returns)]
        _over_slots(gae_kernel, (*flat[:2], last_value, *flat[2:4], cut, final_value, gamma, gae_lambda, *flat[4:]), value.shape)
    else:
        mask = np.ones(value.shape, bool) if mask is None else mask
        discount = np.full(value.shape, gamma) if discount is None else discount.astype(np.float64, copy=False)
        given = (reward, value, last_value, terminated, truncated, cut, final_value, mask, discount, gae_lambda, advantage, returns)
        _over_slots(masked_gae_kernel, given, value.shape)
    return advantage, returns


def _over_slots(kernel: Callable[..., None], given: tuple[Any, ...], shape: tuple[int, int]) -> None:
    """Run a kernel over slots [first, stop), its last two arguments: all at once, or divided among threads if that is faster."""
    num_steps, num_slots = shape
    num_threads = min(torch.get_num_threads(), max(num_slots // 64, 1)) if num_steps * num_slots >= _THREADS_FROM else 1
    if num_threads == 1:
        kernel(*given, 0, num_slots)
        return
    bounds = [round(part * num_slots / num_threads) for part in range(num_threads + 1)]
    others = [threading.Thread(target=kernel, args=(*given, *part)) for part in itertools.pairwise(bounds[1:])]
    for thread in others:
        thread.start()
    kernel(*given, bounds[0], bounds[1])
    for thread in others:
        thread.join()


def chunk_gae(
    *,
    reward: Array,
    executed: Array,
    value: Array,
    last_value: Array,
    terminated: Array,
    truncated: Array,
    final_value: Array,
    gamma: float,
    gae_lambda: float,
) -> tuple[Array, Array]:
    """GAE for decisions that are chunks of up to K steps; values are at the chunks' boundaries.

    With K' executed steps: R_t = sum_(k < K') gamma^k r_(t,k), delta_t = R_t + gamma^K' V_(t+1) - V_t and
    A_t = delta_t + gamma^K' lambda A_(t+1), the semi-Markov form of GAE (options: Sutton, Precup and Singh 1999). Terminated and
    truncated chunks are treated as `gae` treats steps. A reward or success anywhere inside a chunk counts. Steps that were not
    executed, after an episode's end, do not count, and a chunk without an executed step is masked.

    Args:
        reward: [T, N, K] of each step; any value where not executed.
        executed: [T, N, K] bool.
        value: [T, N] before each chunk.
        last_value: [N] after the last chunk.
        terminated, truncated: [T, N] bool: the episode ended within the chunk.
        final_value: [C], in the order of ``np.argwhere(truncated & ~terminated)``.

    Returns advantages and returns of the chunks, both [T, N].

    Raises ValueError as `gae` does.
    """
    _check_chunks(reward, executed, terminated)
    counted: Any = executed.any(-1)
    chunk_reward, discount = sum_chunks(reward=reward, executed=executed, gamma=gamma)
    return gae(
        reward=chunk_reward,
        value=value,
        last_value=last_value,
        terminated=terminated,
        truncated=truncated,
        final_value=final_value,
        gamma=gamma,
        gae_lambda=gae_lambda,
        mask=counted,
        discount=discount,
    )


def sum_chunks(*, reward: Array, executed: Array, gamma: float) -> tuple[Array, Array]:
    """Discounted sums over the executed steps of chunks.

    Args:
        reward: [..., K]
        executed: [..., K] bool; k counts only executed steps.

    Returns sum_k gamma^k r_k and gamma^(number of executed steps), both [...] of the type of `reward`.
    """
    if isinstance(reward, Tensor):
        order = executed.long().cumsum(-1)
        weight = torch.pow(float(gamma), (order - 1).clamp(min=0).double())
        total = torch.where(executed, reward.double() * weight, 0.0).sum(-1)
        return total.to(reward.dtype), torch.pow(float(gamma), order[..., -1].double()).to(reward.dtype)
    ranks = executed.astype(np.int64).cumsum(-1)
    weights = np.power(float(gamma), np.maximum(ranks - 1, 0))
    # `where` comes before the product, because rewards of steps that were not executed may be NaN or infinite.
    summed = (np.where(executed, reward, 0).astype(np.float64) * weights).sum(-1)
    return summed.astype(reward.dtype), np.power(float(gamma), ranks[..., -1]).astype(reward.dtype)


def action_gae(
    *,
    reward: Array,
    executed: Array,
    value: Array,
    last_value: Array,
    terminated: Array,
    truncated: Array,
    final_value: Array,
    gamma: float,
    gae_lambda: float,
) -> tuple[Array, Array]:
    """GAE step by step through chunks of K actions, for a critic with one value per action (RLinf-VLA's action-level value).

    The executed steps of a slot's chunks follow one another as steps do in `gae`; an episode ends at the last executed step of a
    chunk that is terminated or truncated.

    Args:
        reward, value: [T, N, K]; any value where not executed.
        executed: [T, N, K] bool.
        last_value: [N] value of the first action after the last chunk.
        terminated, truncated: [T, N] bool, of the chunks.
        final_value: [C], in the order of ``np.argwhere(truncated & ~terminated)`` over the chunks.

    Returns advantages and returns, both [T, N, K], 0 where not executed.

    Raises ValueError as `gae` does.
    """
    _check_chunks(reward, executed, terminated)
    if tuple(value.shape) != tuple(reward.shape):
        raise ValueError(
            f"value must be [T, N, K] as reward is, {tuple(reward.shape)}, got {tuple(value.shape)}. Use chunk_gae for [T, N]."
        )
    steps, slots, length = reward.shape
    last = _last_executed(executed)
    flat_terminated, flat_truncated = _flat_steps(terminated[..., None] & last), _flat_steps(truncated[..., None] & last)
    ordered = _reorder_final(truncated, terminated, last, final_value)
    advantage, returns = gae(
        reward=_flat_steps(reward),
        value=_flat_steps(value),
        last_value=last_value,
        terminated=flat_terminated,
        truncated=flat_truncated,
        final_value=ordered,
        gamma=gamma,
        gae_lambda=gae_lambda,
        mask=_flat_steps(executed),
    )
    shape = (steps, length, slots)
    return advantage.reshape(shape).swapaxes(1, 2), returns.reshape(shape).swapaxes(1, 2)


def returns_to_go(
    *,
    reward: Array,
    terminated: Array,
    truncated: Array,
    gamma: float,
    last_value: Array | None = None,
    final_value: Array | None = None,
    mask: Array | None = None,
) -> Array:
    """REINFORCE's credit (Williams 1992), time-major: R_t = r_t + gamma (1 - done_t) R_(t+1).

    Without a critic, what comes after the last step or after a truncation is unknown and counts as 0, unless `last_value` [N] and
    `final_value` [K] give it. This is `gae` with lambda = 1 and no values in between.

    Returns [T, N] of the type of `reward`, 0 where masked.
    """
    zeros = torch.zeros_like if isinstance(reward, Tensor) else np.zeros_like
    cut = truncated & ~terminated
    return gae(
        reward=reward,
        value=zeros(reward),
        last_value=zeros(reward[:1].sum(0)) if last_value is None else last_value,
        terminated=terminated,
        truncated=truncated,
        final_value=zeros(reward[cut]) if final_value is None else final_value,
        gamma=gamma,
        gae_lambda=1.0,
        mask=mask,
    )[1]


def token_returns(*, reward: Array, gamma: float, mask: Array | None = None) -> Array:
    """Discounted returns-to-go along rows: G_l = r_l + gamma G_(l+1) over the entries in `mask`.

    REINFORCE (Williams 1992) if a row is an episode of tokens or turns. Holes in the mask (a tool's output between two turns)
    carry the return through undiscounted; implementations that multiply the running return with the mask lose it there.

    Args:
        reward: [B, L] float32 or float64.
        mask: [B, L] bool; None: all entries.

    Returns [B, L], 0 where masked.
    """
    if reward.ndim != 2 or (mask is not None and mask.shape != reward.shape):
        raise ValueError(f"reward and mask must be [B, L], got {tuple(reward.shape)} and {None if mask is None else tuple(mask.shape)}.")
    check_types((reward,), () if mask is None else (mask,))
    if isinstance(reward, Tensor) and reward.device.type != "cpu":
        return token_returns_scan(reward=reward, gamma=gamma, mask=mask)
    from embodied_rl.algorithms.kernels import token_returns_kernel

    rewards = as_numpy(reward)
    returns = np.empty(rewards.shape, rewards.dtype)
    token_returns_kernel(rewards, _NO_MASK if mask is None else as_numpy(mask), gamma, returns)
    return alike(returns, reward)


def whiten(x: Array, mask: Array | None = None) -> Array:
    """(x - mean) / sqrt(variance + 1e-8) with the unbiased variance over all entries, or over those in `mask` (0 elsewhere).

    A single entry has no variance: it becomes 0, as do entries that are all equal.
    """
    shown = x if mask is None else x[mask]
    chosen = shown.detach().double() if isinstance(shown, Tensor) else shown.astype(np.float64)
    count = math.prod(chosen.shape)
    if count < 2 or chosen.min() == chosen.max():
        return torch.zeros_like(x) if isinstance(x, Tensor) else np.zeros_like(x)
    mean = chosen.mean()
    scale, middle = math.sqrt(float(((chosen - mean) ** 2).sum()) / (count - 1) + WHITEN_EPS), float(mean)
    if isinstance(x, Tensor):
        result = ((x.detach().double() - middle) / scale).to(x.dtype)
        return result if mask is None else torch.where(mask, result, torch.zeros_like(result))
    whitened = ((x.astype(np.float64) - middle) / scale).astype(x.dtype)
    return whitened if mask is None else np.where(mask, whitened, 0).astype(x.dtype)


def _check_gae(
    reward: Array, value: Array, last_value: Array, terminated: Array, truncated: Array, mask: Array | None, discount: Array | None
) -> None:
    shape = tuple(reward.shape)
    like: list[Array] = [value, terminated, truncated]
    like += [array for array in (mask, discount) if array is not None]
    if len(shape) != 2 or any(tuple(array.shape) != shape for array in like) or tuple(last_value.shape) != shape[1:]:
        shapes = [shape, *(tuple(array.shape) for array in like), tuple(last_value.shape)]
        raise ValueError(f"reward, value, terminated, truncated, mask and discount must be [T, N] and last_value [N], got {shapes}.")
    check_types((reward, value, last_value), (terminated, truncated, *(() if mask is None else (mask,))))


def _check_chunks(reward: Array, executed: Array, terminated: Array) -> None:
    if reward.ndim != 3 or executed.shape != reward.shape or tuple(terminated.shape) != tuple(reward.shape[:2]):
        shapes = [tuple(array.shape) for array in (reward, executed, terminated)]
        raise ValueError(f"reward and executed must be [T, N, K], terminated and truncated [T, N], got {shapes}.")
    check_types((reward,), (executed,))


def _last_executed(executed: Array) -> Array:
    """[T, N, K]: the last executed step of each chunk."""
    if isinstance(executed, Tensor):
        count = executed.long().cumsum(-1)
        return executed & (count == count[..., -1:])
    counts = executed.astype(np.int64).cumsum(-1)
    return executed & (counts == counts[..., -1:])


def _flat_steps(array: Array) -> Array:
    """[T, N, K] → [T·K, N]: the steps of a slot in sequence."""
    steps, slots, length = array.shape
    return array.swapaxes(1, 2).reshape(steps * length, slots)


def _reorder_final(truncated: Array, terminated: Array, last: Array, final_value: Array) -> Array:
    """Reorder final values from the chunks' order to that of the flattened steps, where a shorter chunk of a later slot comes first."""
    cut = truncated & ~terminated
    check_final_value(tuple(final_value.shape), int(cut.sum()))
    if isinstance(cut, Tensor) and isinstance(final_value, Tensor):
        dense = final_value.new_zeros(cut.shape)
        dense[cut] = final_value
        spread = dense[..., None].expand(last.shape)
    else:
        dense = np.zeros(cut.shape, final_value.dtype)
        dense[cut] = final_value
        spread = np.broadcast_to(dense[..., None], last.shape)
    return _flat_steps(spread)[_flat_steps(cut[..., None] & last)]


# ---- recursions over time --------------------------------------------------------------------------------------------------


def reverse_scan(x: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + decay_t y_(t+1) along the first axis, with y_T = 0.
    `x`, `decay`: [T, ...] of one floating type; NaN in x spreads to everything before it, decay 0 or not."""
    reach = 1
    while reach < x.shape[0]:
        # Each entry holds the sum over `reach` successors; it now adds the sums that as many later entries hold.
        x = torch.cat([torch.addcmul(x[:-reach], decay[:-reach], x[reach:]), x[-reach:]])
        decay = torch.cat([decay[:-reach] * decay[reach:], decay[-reach:]])
        reach *= 2
    return x


@torch.no_grad()
def gae_scan(
    *,
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    gamma: float,
    gae_lambda: float,
    mask: Tensor | None = None,
    discount: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gae` for tensors on any device. Arguments, results and errors are the same."""
    cut = truncated & ~terminated
    check_final_value(tuple(final_value.shape), int(cut.sum()))
    values = value.double()
    following = _next_counted(values, last_value.double(), mask)
    following = following.masked_scatter(cut, final_value.double())
    following = following.masked_fill(terminated, 0.0)
    step_gamma = torch.full_like(values, gamma) if discount is None else discount.double()
    delta = reward.double() + step_gamma * following - values
    decay = (step_gamma * gae_lambda).masked_fill(terminated | truncated, 0.0)
    if mask is not None:
        # A masked step is the identity: it adds nothing and passes on what comes after it.
        delta, decay = delta.masked_fill(~mask, 0.0), decay.masked_fill(~mask, 1.0)
    advantage = reverse_scan(delta, decay).to(value.dtype)
    returns = advantage + value
    if mask is not None:
        advantage, returns = advantage.masked_fill(~mask, 0.0), returns.masked_fill(~mask, 0.0)
    return advantage, returns


def _next_counted(values: Tensor, last_value: Tensor, mask: Tensor | None) -> Tensor:
    """[T, N]: for each step the value of the next step that counts; `last_value` after the last of them."""
    extended = torch.cat([values, last_value[None]])
    if mask is None:
        return extended[1:]
    num_steps = values.shape[0]
    place = torch.arange(num_steps, device=values.device)[:, None].expand_as(values)
    place = torch.where(mask, place, num_steps)
    place = torch.cat([place[1:], torch.full_like(place[:1], num_steps)])
    nearest = place.flip(0).cummin(0).values.flip(0)
    return extended.gather(0, nearest)


@torch.no_grad()
def token_returns_scan(*, reward: Tensor, gamma: float, mask: Tensor | None = None) -> Tensor:
    """`token_returns` for tensors on any device."""
    gain = reward.double().t()
    decay = torch.full_like(gain, gamma)
    if mask is not None:
        gain, decay = gain.masked_fill(~mask.t(), 0.0), decay.masked_fill(~mask.t(), 1.0)
    returns = reverse_scan(gain, decay).t().to(reward.dtype)
    return returns.contiguous() if mask is None else returns.masked_fill(~mask, 0.0)
