"""Learning rate over time."""

import math

DECAY_EPOCHS = (30, 60, 80)  # Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 5.1


def learning_rate(
    peak_lr: float, epoch: float, *, schedule: str, epochs: int, warmup_epochs: float
) -> float:
    """The learning rate after ``epoch`` epochs, a fraction within one, of ``epochs``.

    It rises linearly during ``warmup_epochs``. ``"step"`` divides it by ten at `DECAY_EPOCHS`;
    ``"cosine"`` takes it to zero (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983).
    """
    if epoch < warmup_epochs:
        return peak_lr * epoch / warmup_epochs
    if schedule == "step":
        return peak_lr * 0.1 ** sum(epoch >= decay_epoch for decay_epoch in DECAY_EPOCHS)
    progress = (epoch - warmup_epochs) / (epochs - warmup_epochs)
    return peak_lr * 0.5 * (1 + math.cos(math.pi * progress))
