"""What a chain is made of: what an algorithm may ask, a step of it, and what noise leaves of it."""
