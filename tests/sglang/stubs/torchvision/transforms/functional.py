from torchvision import __getattr__ as __getattr__
