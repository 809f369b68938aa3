"""OpenVLA (Kim et al. 2024) and OpenVLA-OFT (Kim et al. 2025) as native modules, with the published checkpoints' key names."""
