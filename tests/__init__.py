import os

# Before anything imports numpy: its products would be added in the order of whatever kernels it takes for a processor, and golden runs
# have one hash for all. Haswell's run on every x86 processor of the last ten years; others do not look.
os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")
