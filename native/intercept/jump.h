// An exported function of which only the name is known: it jumps to the driver's own, arguments untouched.
#pragma once

#if defined(__x86_64__)
#define MOORAGE_JUMP(name, index)                                                                                  \
  __asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n"                                      \
          "  endbr64\n  movq moorage_real_table@GOTPCREL(%rip), %rax\n  jmp *(8*" #index ")(%rax)\n"                \
          ".size " #name ", .-" #name "\n");
#elif defined(__aarch64__)
#define MOORAGE_JUMP(name, index)                                                                                  \
  __asm__(".text\n.globl " #name "\n.type " #name ", %function\n" #name ":\n"                                      \
          "  bti c\n  adrp x16, :got:moorage_real_table\n  ldr x16, [x16, :got_lo12:moorage_real_table]\n"           \
          "  add x16, x16, #(8*" #index ") & 0xFFF\n  add x16, x16, #(8*" #index ") & 0xFFF000\n  ldr x16, [x16]\n"  \
          "  br x16\n.size " #name ", .-" #name "\n");
#else
#error "No jump for this processor"
#endif
