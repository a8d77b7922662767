"""From a formula and what is public about the columns to a plain NumPyro model and its arguments."""
