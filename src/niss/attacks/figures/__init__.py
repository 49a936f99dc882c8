"""One figure per attack, drawn from its findings without a display."""
