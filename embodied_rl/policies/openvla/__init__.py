"""OpenVLA (Kim et al. 2024) and OpenVLA-OFT (Kim et al. 2025) as modules of our own, with the published checkpoints' key names."""
