"""Training steps without Apex: torch.autocast and torch's GradScaler in the place of apex.amp."""

import torch
from data import Batches
from meters import Scores
from torch.nn import functional as F
from training import Trainer, annotated

DTYPES = {"O1": torch.float16, "O4": torch.bfloat16}  # of autocast; O0 has none


class PlainTrainer(Trainer):
    """A model in float32, whose functions torch casts as the opt level says."""

    def __init__(self, args, processes, model, optimizer):
        super().__init__(args, processes, model, optimizer)
        enabled = args.opt_level == "O1"
        self.scaling = torch.amp.GradScaler(processes.device.type, enabled=enabled)

    def casts(self) -> torch.autocast:
        level = self.args.opt_level
        dtype = DTYPES.get(level, torch.bfloat16)
        return torch.autocast(self.processes.device.type, dtype, enabled=level in DTYPES)

    def loss_scale(self) -> float:
        return self.scaling.get_scale()

    def train_step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple:
        with annotated("forward"), self.casts():
            logits = self.model(images)
            loss = F.cross_entropy(logits, labels)
        with annotated("backward"):
            self.optimizer.zero_grad()
            self.scaling.scale(loss).backward()
        with annotated("update"):
            self.scaling.step(self.optimizer)
            self.scaling.update()
        return loss.detach(), logits.detach()

    def validate(self, batches: Batches) -> Scores:
        with self.casts():
            return super().validate(batches)
