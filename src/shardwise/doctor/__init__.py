"""Known faults, each a check with an id: in a configuration, on a machine, in what a run left."""
