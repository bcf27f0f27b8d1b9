"""What a model does to numbers around its output head, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """logits = cap * tanh(scale * head(hidden_scale * hidden) / cap), without tanh where there is
    no cap."""

    hidden_scale: float = 1.0
    scale: float = 1.0
    cap: float | None = None

    @property
    def logit_scale(self) -> float:
        """Both scales as one after the head. A head with a bias has no `hidden_scale`."""
        return self.hidden_scale * self.scale


PLAIN = HeadForm()
