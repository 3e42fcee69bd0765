"""The commands of `proxprop`, one file each."""
