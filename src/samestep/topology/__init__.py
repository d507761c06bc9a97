"""What is here: the launcher's variables, the devices and the network of this machine."""
