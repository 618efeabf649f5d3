"""The step that the optimizers share: lists, launches, states, checkpoints and checks."""
