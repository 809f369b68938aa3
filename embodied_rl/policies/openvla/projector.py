"""What stands between the parts of OpenVLA and around them: projectors, and the heads on the language model's hidden states.

Shape legend: B rows, P patches, K steps of a chunk, A action dimensions, D width of the language model.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Projector(nn.Module):
    """Patch features into the language model's space: three layers with GELU between, the first four times as wide as its input."""

    def __init__(self, vision_width: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, hidden_size)
        self.fc3 = nn.Linear(hidden_size, hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        """[B, P, d0 + d1] → [B, P, D]"""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(patches)))))


class ProprioProjector(nn.Module):
    """The robot's own state as one token (OpenVLA-OFT)."""

    def __init__(self, proprio_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, proprio: Tensor) -> Tensor:
        """Normalised state [B, dim] → [B, D]"""
        return self.fc2(F.gelu(self.fc1(proprio)))


class ResidualBlock(nn.Module):
    """x + relu(linear(norm(x)))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class ResidualMLP(nn.Module):
    """The regression network of OpenVLA-OFT ("MLPResNet")."""

    def __init__(self, num_inputs: int, width: int, num_outputs: int, num_blocks: int = 2) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(num_inputs)
        self.fc1 = nn.Linear(num_inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(num_blocks))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1ActionHead(nn.Module):
    """Continuous actions by regression: the hidden states of one step's A placeholders, side by side, to its A values."""

    def __init__(self, hidden_size: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = ResidualMLP(hidden_size * action_dim, hidden_size, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, K·A, D] → normalised actions [B, K, A]"""
        rows, units, width = hidden.shape
        return self.model(hidden.reshape(rows, units // self.action_dim, self.action_dim * width))


class ValueHead(nn.Module):
    """State values from the hidden state at the prompt's last token: D → 512 → 128 → 1 with GELU, no bias in the last layer; or → K, one
    for each step of a chunk (RLinf-VLA's action level).

    The shape and initialisation of RL4VLA (Liu et al. 2025) and RLinf-VLA (2025), with RL4VLA's key names.
    """

    def __init__(self, hidden_size: int, num_values: int | None = None) -> None:
        """`num_values`: K; None: one value, without a separate dimension."""
        super().__init__()
        self._single = num_values is None
        self.head_l1 = nn.Linear(hidden_size, 512)
        self.head_l2 = nn.Linear(512, 128)
        self.head_l3 = nn.Linear(128, num_values or 1, bias=False)
        for layer in (self.head_l1, self.head_l2):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.head_l3.weight, std=0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, D] → [B] float32, or [B, K]"""
        x = hidden.to(self.head_l1.weight.dtype)
        values = self.head_l3(F.gelu(self.head_l2(F.gelu(self.head_l1(x))))).float()
        return values.squeeze(-1) if self._single else values


_RLINF_VALUE_KEYS = {"mlp.0.": "head_l1.", "mlp.2.": "head_l2.", "mlp.4.": "head_l3."}


def value_head_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take a value head's weights out of a state dict by RL4VLA's names (``head_l1.weight``, …) or RLinf's (``mlp.0.weight``, …).

    Any prefix that ends in ``value_head.`` is dropped, and other keys that stand beside such a prefix are left out.
    """
    marked = {name.rpartition("value_head.")[2]: tensor for name, tensor in state.items() if "value_head." in name}
    found = marked or dict(state)
    for theirs, ours in _RLINF_VALUE_KEYS.items():
        found = {ours + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor for name, tensor in found.items()}
    return found
