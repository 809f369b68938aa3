"""Where a run's numbers go: console, JSON lines, TensorBoard, Weights & Biases, curves. Each library is imported by its own logger."""

from embodied_rl.loggers.base import LOGGERS, Logger, LoggerGroup, make_loggers

__all__ = ["LOGGERS", "Logger", "LoggerGroup", "make_loggers"]
