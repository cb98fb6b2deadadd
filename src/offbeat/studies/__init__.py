"""Several experiments: compared, tuned, chosen between, spread over machines, shown on one page."""
