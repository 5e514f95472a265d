"""The laboratory: data, models, experiments, report and command line around the library."""
