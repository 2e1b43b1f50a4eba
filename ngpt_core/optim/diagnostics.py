"""placeholder"""
class Diagnostics: pass
