"""Run candidates beside the baseline, keep or reject: `conduct.tune` and `conduct.why`."""
