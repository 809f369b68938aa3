"""Between text environments and token backends: makes prompts from observations and actions from answers. No torch."""
