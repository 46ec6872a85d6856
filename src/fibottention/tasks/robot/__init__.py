"""Robot learning: demonstrations, a diffusion policy, and simulators to try it in."""
