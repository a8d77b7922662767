"""A NumPyro model as a prior that no row enters, times one factor for each row."""
