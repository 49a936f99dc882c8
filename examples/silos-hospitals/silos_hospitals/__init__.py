"""Who comes back within a month? Eight hospitals learn it together, and each of their patients is hidden."""
