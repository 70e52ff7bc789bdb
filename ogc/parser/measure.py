"""stub"""
class Measurer:
    pass
