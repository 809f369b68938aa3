"""What stands between text environments and token backends: prompts out of observations, actions out of answers. No torch."""
