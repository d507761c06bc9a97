"""Proof and microscope: runs at several sizes, compared bit by bit."""
