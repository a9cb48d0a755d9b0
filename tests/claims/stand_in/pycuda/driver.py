"""Contexts, the newest one current; whoever ends with one current is aborted, as by pycuda."""

import atexit
import os
import sys

import stand_in_cuda

stack = []


def init():
    stand_in_cuda.init()


class Context:
    def __init__(self, number):
        self.number = number

    @staticmethod
    def pop():
        stack.pop()

    @staticmethod
    def get_current():
        return stack[-1] if stack else None

    def push(self):
        stack.append(self)

    def detach(self):
        stand_in_cuda.release(self.number)
        if self in stack:  # one that is current is so no more
            stack.remove(self)


class Device:
    def __init__(self, number):
        self.number = number

    def make_context(self):
        stand_in_cuda.retain(self.number)
        context = Context(self.number)
        stack.append(context)
        return context


@atexit.register
def _at_exit():
    if stack:
        print("PyCUDA ERROR: The context stack was not empty upon module cleanup.", file=sys.stderr)
        os.abort()
