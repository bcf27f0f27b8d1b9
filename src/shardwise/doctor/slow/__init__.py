"""Why a run is slower than its plan: causes with their share of the time, the largest first."""
