"""What libraries say that is not for users of a command."""

from __future__ import annotations


def quieten_transformers() -> None:
    """Silence its notes on configurations, which are for people who write code with it."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
