"""Controllers of the Fetch arm (gymnasium-robotics); the observation holds everything they need, in metres."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

STEP_M = 0.05
"""The gripper's way along one axis at action 1, as the task commands it; it arrives with some delay."""
_BOX_M = 0.025
"""Half a side."""
_TRAVEL_ABOVE_M = 0.12


class FetchReachExpert:
    """Straight to the goal."""

    def __call__(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """From ``state`` [13] = gripper (3), …, goal (3) to the action [4] float32."""
        state = observation["state"]
        return towards(state[-3:] - state[:3])


class FetchPushExpert:
    """Goes above the far side of the box, down to the table, and pushes the box towards the goal, keeping behind it."""

    def __call__(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """From ``state`` [28] = gripper (3), box (3), …, goal (3) to the action [4] float32."""
        state = observation["state"].astype(np.float64)
        gripper, box, goal = state[:3], state[3:6], state[-3:]
        to_goal = goal[:2] - box[:2]
        distance = float(np.linalg.norm(to_goal))
        if distance < 0.01:
            return towards(np.zeros(3))
        ahead = to_goal / distance
        behind = box[:2] - ahead * (_BOX_M + 0.045)
        from_box = gripper[:2] - box[:2]
        along, aside = float(from_box @ ahead), float(abs(from_box @ np.array([-ahead[1], ahead[0]])))
        if along < -_BOX_M and aside < 0.015 and gripper[2] < box[2] + 0.02:
            # Slower near the goal, for the box slides on; the line from the gripper through the box is kept on the goal.
            target = box[:2] - ahead * _BOX_M + ahead * min(0.05, 0.6 * distance)
            return towards(np.append(target - gripper[:2], box[2] - gripper[2]), gain=0.6)
        if np.linalg.norm(gripper[:2] - behind) < 0.012:
            return towards(np.append(behind - gripper[:2], box[2] - gripper[2]))
        height = box[2] + _TRAVEL_ABOVE_M
        across = (behind - gripper[:2]) if gripper[2] > height - 0.04 else np.zeros(2)
        return towards(np.append(across, height - gripper[2]))


def towards(way: np.ndarray, gain: float = 1.0) -> np.ndarray:
    """The action [4] that moves the gripper by `way` [3] metres, as far as one step goes; the fingers stay as they are."""
    return np.append(np.clip(gain * way / STEP_M, -1.0, 1.0), 0.0).astype(np.float32)
