"""Studies made with an older form of Hope: their stored runs still make their pages."""
