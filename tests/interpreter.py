"""Triton's interpreter, in a process of the tests."""


def prepare() -> None:
    """Let launches alone redirect the functions of triton.language, not every call of a device function as well.

    The redirection takes milliseconds, and our kernels call small device functions in loops.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    redirect = interpreter._patch_lang

    def redirect_once(function):
        languages = [module for module in (tl, tl.core) if any(module is x for x in function.__globals__.values())]
        if any(tl.core.is_builtin(module.load) for module in languages):
            return redirect(function)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = redirect_once
