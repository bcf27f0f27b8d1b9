"""Events, meters and the line that is printed."""
