"""The files that demonstrations are kept in: Diffusion Policy's zarr, robomimic's HDF5, LeRobot's folders."""

from fibottention.tasks.robot.formats.base import FORMATS, Demonstrations, open_demonstrations, write_demonstrations

__all__ = ["FORMATS", "Demonstrations", "open_demonstrations", "write_demonstrations"]
