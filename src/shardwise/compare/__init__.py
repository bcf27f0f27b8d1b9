"""What other stacks reach: published runs, profiles fitted to them, and a run beside them."""
