"""The sampler: penalties, draws with top-k, top-p and min-p, log probabilities. Needs torch. Import the modules."""
