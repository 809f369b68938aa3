"""Loggers of a run's metrics: console, JSON lines, TensorBoard, Weights & Biases, curves. Each library is imported by its own logger."""

from embodied_rl.loggers.base import LOGGERS, Logger, LoggerGroup, check_loggers, make_loggers

__all__ = ["LOGGERS", "Logger", "LoggerGroup", "check_loggers", "make_loggers"]
